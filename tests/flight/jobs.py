"""Small jobs on paper: what every rank calls, carried out as blocking collectives are, and what the recorders hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.flight.recording import CallState, RecordedCall, Recording, StackLine, Tensors


@dataclass(frozen=True, slots=True)
class Planned:
    """One call that a rank will make."""

    group: str
    operation: str = "all_reduce"
    elements: int = 4
    dtype: str = "Float"


STOP = Planned("")
"""Here a rank stays in its own code."""


@dataclass(slots=True)
class PaperJob:
    """Groups and what each rank calls. ``backend``: gloo says neither who belongs to a group nor that a call ended."""

    groups: Mapping[str, tuple[int, ...]]
    plans: Mapping[int, Sequence[Planned]]
    backend: str = "nccl"
    calls: dict[int, list[RecordedCall]] = field(default_factory=dict)

    def run(self) -> PaperJob:
        """Until nobody can go on. A call ends when every member is in it, and they agree."""
        self.calls = {rank: [] for rank in self.plans}
        while moved := [rank for rank in self.plans if self._advance(rank)]:
            self._end_what_is_complete(moved)
        return self

    def recordings(self, kept: int = 1 << 20) -> dict[int, Recording]:
        """``kept``: the size of the ring."""
        members = {} if self.backend == "gloo" else dict(self.groups)
        return {
            rank: Recording(rank=rank, calls=tuple(calls[-kept:]), members=members)
            for rank, calls in self.calls.items()
        }

    def waiting(self) -> set[int]:
        return {rank for rank, calls in self.calls.items() if calls and not calls[-1].over}

    def _advance(self, rank: int) -> bool:
        made = self.calls[rank]
        if (made and not made[-1].over) or len(made) >= len(self.plans[rank]):
            return False
        planned = self.plans[rank][len(made)]
        if planned is STOP:
            return False
        number = 1 + sum(call.group == planned.group for call in made)
        made.append(recorded(planned, number, len(made), self.backend))
        return True

    def _end_what_is_complete(self, moved: Sequence[int]) -> None:
        for name, members in self.groups.items():
            if not set(members) & set(moved):
                continue
            last = [self.calls[rank][-1] if self.calls[rank] else None for rank in members]
            if any(call is None or call.over or call.group != name for call in last):
                continue
            if len({(call.number, call.operation, call.inputs) for call in last if call is not None}) == 1:
                for rank in members:
                    self.calls[rank][-1] = ended(self.calls[rank][-1])


def recorded(planned: Planned, number: int, record: int, backend: str = "nccl") -> RecordedCall:
    tensors = Tensors(((planned.elements,),), (planned.dtype,))
    return RecordedCall(
        record=record,
        group=planned.group,
        description="default_pg" if planned.group == "0" else "undefined",
        backend=backend,
        operation=planned.operation,
        number=number,
        inputs=tensors,
        outputs=tensors,
        created=1_700_000_000.0 + record,
        timeout=600.0,
        stack=(StackLine("step", "/home/me/train.py", 10 + record),),
    )


def ended(call: RecordedCall) -> RecordedCall:
    """As its backend shows it."""
    state = CallState.SCHEDULED if call.backend == "gloo" else CallState.COMPLETED
    return replace(call, state=state, retired=True)


def steps(count: int, group: str = "0") -> Iterator[Planned]:
    for _ in range(count):
        yield Planned(group)
