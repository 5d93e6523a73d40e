"""The interface of every machine, and how their transition tables are read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol, TypeVar

from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.events import Event
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.core.waits import Wait


class Machine(Protocol):
    """Events and time in, effects out; no other door."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, if nothing happens before."""

    def waits(self) -> list[Wait]:
        """What this machine waits for now."""

    def snapshot(self) -> dict[str, object]:
        """The machine's state as plain JSON values."""

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. Called after every event in tests."""


class Stepped(Protocol):
    """The part of a task that trains: it knows its step."""

    @property
    def step(self) -> Step: ...


class WholeTask(Machine, Protocol):
    """All machines of one task behind one door, as a loop and a snapshot need them."""

    @property
    def task(self) -> TaskId: ...

    @property
    def role(self) -> Stepped: ...

    @property
    def awaited(self) -> frozenset[TaskId]:
        """Tasks that were lost and are waited for."""

    def start(self, now: float) -> list[Effect]: ...


State = TypeVar("State", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)


def advance(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger) -> State:
    """The next state; a pair that is not in the table is a defect in Lockstep, and the error names it."""
    try:
        return table[state, trigger]
    except KeyError:
        raise LocalProtocolError(f"no transition from {state.value!r} on {trigger.value!r}") from None
