"""The machine of a server that holds the coordinator's decisions, and takes its place when it has ended."""

from __future__ import annotations

from dataclasses import replace

from lockstep.protocol.coordinator.calls import KeptCalls
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import Event, PeerGone, Received
from lockstep.protocol.core.ids import ClusterShape, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import KeptCall, Resolution, ResolutionHeld
from lockstep.protocol.core.waits import Wait


class DeputyMachine:
    """What one server holds of the coordinator's decisions."""

    def __init__(
        self,
        task: TaskId,
        shape: ClusterShape,
        rules: RecoveryRules,
        journal: Journal,
        coordinator: type[HomedCoordinator] = HomedCoordinator,
    ) -> None:
        """``coordinator``: what it becomes."""
        self.task = task
        self._coordinator = coordinator
        self.held: Resolution | None = None
        self._calls = KeptCalls(keeps=rules.takes_back)
        self._shape = shape
        self._rules = rules
        self._journal = journal
        self._ended: Reason | None = None
        """Why the coordinator whose decisions these are has ended."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(message=Resolution() as told):
                return self._on_resolution(event.peer, told, now)
            case Received(message=KeptCall() as call):
                self._on_call(call)
                return []
            case PeerGone():
                self._on_gone(event)
                return []
            case _:
                return []

    def _on_resolution(self, coordinator: TaskId, told: Resolution, now: float) -> list[Effect]:
        """Hold it. One without joins follows another; the first that this server gets has them."""
        known = self.held
        lacks_joins = not told.joins and (known is None or known.view < told.view)
        if lacks_joins or told.calls > self._calls.complete:
            return []  # what it belongs to was lost with a link: all is said again
        if known is None or told.number >= known.number:
            joins = told.joins or (() if known is None else known.joins)
            self.held = replace(told, joins=joins)
        self._journal.record(now, Happening.ARRIVED, told.step, peer=coordinator, cause="a decision to hold")
        return [Send(coordinator, ResolutionHeld(told.number))]

    def _on_call(self, call: KeptCall) -> None:
        if call.anew:
            self._calls = KeptCalls(keeps=self._rules.takes_back)
        if call.anew or call.number > self._calls.complete:
            self._calls.add(call)

    def _on_gone(self, event: PeerGone) -> None:
        if self.held is None or event.peer != self.held.decisions[0].home_task:
            return
        life = next((join.incarnation for join in self.held.joins if join.task == str(event.peer)), 0)
        if event.incarnation in (0, life):
            self._ended = event.reason

    def take_over(self, now: float) -> tuple[HomedCoordinator, list[Effect]] | None:
        """The coordinator from now on, and its first effects, if this server has to take its place."""
        held, reason = self.held, self._ended
        if held is None or reason is None or held.decisions[0].second_task != self.task or not held.decisions[0].whole:
            return None
        self.held = self._ended = None
        calls, self._calls = self._calls, KeptCalls(keeps=self._rules.takes_back)
        return self._coordinator.resume(held, calls, self._shape, self._rules, self._journal, reason, now)

    # -- what others may ask --

    @property
    def calls_held(self) -> int:
        """How many calls of all workers, whose answers it has."""
        return self._calls.complete

    def next_deadline(self) -> float | None:
        return None

    def waits(self) -> list[Wait]:
        return []

    def snapshot(self) -> dict[str, object]:
        return {"holds": None if self.held is None else self.held.number}

    def check(self) -> None:
        """It has no state of its own that could be wrong."""
