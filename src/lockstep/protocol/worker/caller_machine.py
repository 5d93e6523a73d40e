"""The machine of a worker in calls: what its program brings goes to the coordinator, and what all brought comes back.

A program makes one call at a time and waits in it. The request is repeated until it is answered; after the coordinator
has said that it has the value, only the question who is missing is repeated.

::

    SAID       sent, or to be sent once there is a link; nothing is known of the others
    OPEN       the coordinator has it, and others have not come
    COMPLETE   all have come, and what they brought is here
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import CallAnswered, Effect, Send
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.events import Calling, Event, LinkLost, LinkUp, Received, StepBegun, Tick
from lockstep.protocol.core.ids import INITIAL_STEP, Incarnation, Step, TaskId, worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import CallComplete, CallMade, CallOpen
from lockstep.protocol.core.timing import CALL_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind


class CallPhase(StrEnum):
    SAID = "said"
    OPEN = "open"
    COMPLETE = "complete"


class CallPhaseTrigger(StrEnum):
    MISSING = "the coordinator says who is missing"
    LINK_UP = "the coordinator can be reached again"
    ANSWER = "the answer came"


CALL_PHASE_TRANSITIONS: Mapping[tuple[CallPhase, CallPhaseTrigger], CallPhase] = MappingProxyType(
    {
        (CallPhase.SAID, CallPhaseTrigger.MISSING): CallPhase.OPEN,
        (CallPhase.SAID, CallPhaseTrigger.LINK_UP): CallPhase.SAID,
        (CallPhase.SAID, CallPhaseTrigger.ANSWER): CallPhase.COMPLETE,
        (CallPhase.OPEN, CallPhaseTrigger.MISSING): CallPhase.OPEN,
        (CallPhase.OPEN, CallPhaseTrigger.LINK_UP): CallPhase.SAID,
        (CallPhase.OPEN, CallPhaseTrigger.ANSWER): CallPhase.COMPLETE,
    }
)


@dataclass(slots=True)
class _OwnCall:
    """The call that the program is in, or was in last."""

    made: CallMade
    since: float
    repeat_at: float
    phase: CallPhase = CallPhase.SAID
    missing: tuple[TaskId, ...] = ()

    def advance(self, trigger: CallPhaseTrigger) -> None:
        self.phase = advance(CALL_PHASE_TRANSITIONS, self.phase, trigger)


class CallerMachine:
    """One worker's side of every call."""

    def __init__(self, task: TaskId, coordinator: TaskId, journal: Journal) -> None:
        self.task = task
        self._coordinator = coordinator
        self._journal = journal
        self._linked = False
        self._life: Incarnation = 0
        self._step: Step = INITIAL_STEP
        self._call: _OwnCall | None = None

    @property
    def open_call(self) -> CallMade | None:
        """The call that the program waits in."""
        return None if self._open is None else self._open.made

    @property
    def _open(self) -> _OwnCall | None:
        call = self._call
        return None if call is None or call.phase is CallPhase.COMPLETE else call

    @property
    def has_called(self) -> bool:
        """Whether the program has made any call."""
        return self._call is not None

    def follow(self, coordinator: TaskId, life: Incarnation | None) -> None:
        """Another task coordinates; ``life``: the one that this task is linked with. It is asked at the next tick."""
        if coordinator == self._coordinator:
            return
        self._coordinator, self._linked, self._life = coordinator, life is not None, life or 0
        call = self._open
        if call is not None:
            call.advance(CallPhaseTrigger.LINK_UP)
            call.repeat_at = 0.0

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Calling(made=made):
                return self._on_calling(made, now)
            case StepBegun(step=step):
                self._step = step
            case LinkUp(peer=peer, incarnation=life) if peer == self._coordinator:
                self._linked, self._life = True, life
                return self._say_again(now)
            case LinkLost(peer=peer) if peer == self._coordinator:
                self._linked = False
            case Received(peer=peer, incarnation=life) if peer == self._coordinator and life == self._life:
                return self._on_received(event, now)
            case Tick() if self._open is not None and self._linked and now >= self._open.repeat_at:
                return self._repeat(self._open, now)
        return []

    def _on_calling(self, made: CallMade, now: float) -> list[Effect]:
        if self._open is not None:
            raise LocalProtocolError(f"{self.task} makes a call while it is in another one")
        if self._call is not None and made.place <= self._call.made.place:
            raise LocalProtocolError(f"{self.task} makes the call {made.place} after {self._call.made.place}")
        self._call = _OwnCall(made, now, now + CALL_SECONDS)
        self._journal.record(now, Happening.CALL_MADE, self._step, cause=phrases.call_words(made))
        return [Send(self._coordinator, made)] if self._linked else []

    def _say_again(self, now: float) -> list[Effect]:
        """On a new link, with the value: what was sent on the former one may be lost."""
        call = self._open
        if call is None:
            return []
        call.advance(CallPhaseTrigger.LINK_UP)
        return self._repeat(call, now)

    def _repeat(self, call: _OwnCall, now: float) -> list[Effect]:
        call.repeat_at = now + CALL_SECONDS
        held = call.phase is CallPhase.OPEN
        return [Send(self._coordinator, replace(call.made, data=b"", held=True) if held else call.made)]

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        call = self._open
        match event.message:
            case CallOpen(place=place, workers=workers) if call is not None and place == call.made.place:
                call.advance(CallPhaseTrigger.MISSING)
                call.missing = tuple(worker(index) for index in workers)
            case CallComplete(place=place) as answer if call is not None and place == call.made.place:
                call.advance(CallPhaseTrigger.ANSWER)
                self._journal.record(now, Happening.CALL_COMPLETE, self._step, cause=phrases.call_words(call.made))
                return [CallAnswered(answer)]
        return []

    # -- time, and what others may ask --

    def next_deadline(self) -> float | None:
        return None if self._open is None or not self._linked else self._open.repeat_at

    def waits(self) -> list[Wait]:
        call = self._open
        if call is None:
            return []
        words = phrases.call_words(call.made)
        if call.phase is CallPhase.OPEN and self._linked:
            kind, state, on = WaitKind.CALL, phrases.has_not_come(), call.missing
        else:
            kind, on = WaitKind.ANSWER, (self._coordinator,)
            state = phrases.requested() if self._linked else phrases.not_connected()
        return [Wait(self.task, one, kind, self._step, call.since, call.repeat_at, state, detail=words) for one in on]

    def snapshot(self) -> dict[str, object]:
        call = self._call
        if call is None:
            return {}
        place = call.made.place
        return {
            "place": [place.loop, place.iteration, place.number],
            "open": call is self._open,
            "what": phrases.call_words(call.made),
            "phase": call.phase.value,
            "missing": [str(task) for task in call.missing],
        }

    def check(self) -> None:
        call = self._call
        assert call is None or self.task not in call.missing, "a worker that is in a call is missing from it"
