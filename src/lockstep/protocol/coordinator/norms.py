"""The norm of a step's mean, added up from the servers' parts: decided once, for every server and every worker.

A worker asks its next question only when it knows the answer to the one before. So whoever still waits for an answer
waits for the newest one, except for workers that came back and ask again what was answered in a step that is not
committed: those answers are kept too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lockstep.protocol.core.ids import INITIAL_STEP, Step, TaskId
from lockstep.protocol.core.messages import PartialNorm, TotalNorm
from lockstep.protocol.core.norms import clipping_scale, combined


class Norms:
    """What the servers have measured, and what was decided."""

    def __init__(self) -> None:
        self.step: Step = INITIAL_STEP
        """The step that the newest parts are of."""
        self.since = 0.0
        self._number = 0
        self._parts: dict[TaskId, PartialNorm] = {}
        self._decided: dict[tuple[Step, int], TotalNorm] = {}

    def note(self, server: TaskId, part: PartialNorm, now: float) -> None:
        """One server's part; parts of an earlier question are of no use any more."""
        if (part.step, part.number) < (self.step, self._number):
            return
        if (part.step, part.number) != (self.step, self._number):
            self.step, self._number, self.since = part.step, part.number, now
            self._parts.clear()
        self._parts[server] = part

    def missing(self, servers: Sequence[TaskId], change: int) -> list[TaskId]:
        """Of these, the ones that the newest question waits for; none if nobody asks."""
        if not self._parts or (self.step, self._number) in self._decided:
            return []
        return [server for server in servers if server not in self._parts or self._parts[server].change != change]

    def decide(self, servers: Sequence[TaskId], change: int) -> TotalNorm | None:
        """The answer, if these servers have all given their parts and it is new."""
        key = (self.step, self._number)
        if not self._parts or key in self._decided or self.missing(servers, change):
            return None
        parts = [self._parts[server] for server in servers]
        clip = parts[0].clip
        norms = [norm for part in parts for norm in ([one.norm for one in part.parts] or [part.norm])]
        norm = combined(norms, clip.norm_type)
        self._decided[key] = total = TotalNorm(*key, norm, clipping_scale(norm, clip.limit))
        return total

    @property
    def decided(self) -> tuple[TotalNorm, ...]:
        """All that may still be asked for."""
        return tuple(self._decided.values())

    def take_over(self, decided: Collection[TotalNorm]) -> None:
        """What another coordinator had decided."""
        self._decided = {(total.step, total.number): total for total in decided}

    def answer(self, step: Step, number: int) -> TotalNorm | None:
        return self._decided.get((step, number))

    def forget_before(self, step: Step) -> None:
        """The steps before this one are committed."""
        newest = max(self._decided, default=None)
        for key in _older(self._decided, step):
            if key != newest:
                del self._decided[key]


def _older(keys: Collection[tuple[Step, int]], step: Step) -> list[tuple[Step, int]]:
    return [key for key in keys if key[0] < step]
