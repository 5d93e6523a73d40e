"""What workers have sealed, or asked: which of their gradients are final, and how the mean of these is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.messages import Clip, Seal
from lockstep.protocol.server.contributing import ContributingWorkers
from lockstep.protocol.server.ledger import Ledger, WorkerSide, sealed_edition


class Seals:
    """The newest seals of all workers."""

    def __init__(self, workers: Mapping[TaskId, WorkerSide], contributing: ContributingWorkers) -> None:
        self._workers = workers
        self._contributing = contributing

    def of(self, members: Sequence[TaskId], step: Step) -> list[Seal]:
        return [seal for m in members if (seal := self._workers[m].seal) is not None and seal.step == step]

    def of_all(self, step: Step) -> list[Seal]:
        """Of those who contribute to this step."""
        return self.of(self._contributing.of(step), step)

    def are_met(self, ledger: Ledger) -> bool:
        """Every contributor has sealed the step, or asked for its norm, and what it meant is what is here."""
        return all(
            (known := ledger.arrived.get(member)) is not None
            and known.edition == sealed_edition(self._workers[member].seal, ledger.version, ledger.bucket)
            for member in self._contributing.of(ledger.version)
        )

    def question(self, step: Step) -> tuple[int, Clip] | None:
        """The question for a norm that every contributor asks now."""
        seals = self.of_all(step)
        if len(seals) < len(self._contributing.of(step)) or len({(seal.number, seal.clip) for seal in seals}) != 1:
            return None
        clip = seals[0].norm_clip
        return None if clip is None else (seals[0].number, clip)

    def why_not_with(self, side: WorkerSide, seal: Seal) -> Reason | None:
        """Gradients of two optimizers, or of two places in the program, must not be averaged; and if one worker goes
        on with the step, no other may begin it anew."""
        for other in self._workers.values():
            known = other.seal
            if known is None or known.step != seal.step or other is side:
                continue
            first, second = sorted((known, seal), key=lambda one: one.number)
            same = first.number == second.number
            if (same and known.occasion != seal.occasion) or (not same and not first.asks):
                text = phrases.other_calls(seal.step, seal.occasion, other.id, known.occasion)
                return Reason(Cause.OUT_OF_STEP, text, peer=str(other.id))
        return None


def without_gradient(seals: Sequence[Seal], bucket: BucketId) -> tuple[int, ...]:
    """The parameters that have no gradient on any worker; empty where the whole bucket is absent."""
    partial = [set(seal.without) for seal in seals if bucket not in seal.absent]
    return tuple(sorted(set.intersection(*partial))) if partial else ()


def limit_of(seals: Sequence[Seal]) -> float:
    """What the values of the mean are cut off at, where workers clip it by value."""
    return min((clip.limit for seal in seals for clip in seal.clip if not clip.by_norm), default=inf)
