"""The machine of a rank that trains, in a job without servers whose ranks come back (``rank_coordinator.py``).

Its own gradients stay what they are until the *word* of a step: every rank has every mean of it. Until then the rank
that has a bucket may be lost, and its next incarnation needs them again. A rank whose means are all here says so, in
the view that it knows, and waits; the word is a ``Commit``, or a view that begins after the step.
"""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import Effect, Send, SendPull, WordGiven
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.events import Event, LinkUp, Received, StepBegun, Tick, VersionArrived
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import Applied, Commit, Layout, LocalState, View
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.worker.holdings import HeldBucketTrigger, ServerSide
from lockstep.protocol.worker.worker_machine import WorkerMachine


class RankMachine(WorkerMachine):
    """One rank's gradients and means."""

    def __init__(self, task: TaskId, shape: ClusterShape, journal: Journal) -> None:
        super().__init__(task, shape, journal, eager=True, tells_state=True)
        self.word: Step = INITIAL_STEP - 1
        """The newest step of which every rank is known to have every mean."""
        self._told: dict[Step, LocalState] = {}
        """States that a second rank may not hold yet."""
        self._number = 0
        """Of the newest view."""
        self._late = False
        """This incarnation has come back to a job that runs."""
        self._waits_since: float | None = None
        self._ask_again_at = 0.0

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(message=Commit(step=step)):
                return self._on_word(step, now)
            case LinkUp(peer=peer) if peer in self._servers and self._is_another(peer, event.incarnation):
                self._offer_again(self._servers[peer], now)
                return super().handle(event, now)
            case StepBegun(step=step) if step - 1 > self.word:
                raise LocalProtocolError(f"{self.task} began step {step} before the word of step {step - 1}")
            case VersionArrived():
                return super().handle(event, now) + self._say_if_whole(now)
            case Tick():
                return super().handle(event, now) + self._ask_again_if_due(now)
            case _:
                return super().handle(event, now)

    def _on_view(self, view: View, now: float) -> list[Effect]:
        if view.number <= self._number:
            return []
        if not self._number:
            self._late = view.number > 1 and view.start > INITIAL_STEP
        self._number = view.number
        self._coordinator = view.decisions[0].home_task
        effects = self._on_word(view.start - 1, now)
        if self._layout is None:
            return effects
        return effects + self._tell_coordinator(now)

    def _on_prepared(self, plan: Plan, layout: Layout, now: float) -> list[Effect]:
        """A rank that has come back needs no mean of the step before: what was made of them is to be had elsewhere."""
        effects = super()._on_prepared(plan, layout, now)
        if not self._late:
            return effects
        for bucket in self._buckets:
            bucket.go(HeldBucketTrigger.ARRIVE)
            bucket.version = layout.start
        for peer in self._servers.values():
            peer.awaited = 0
        return [one for one in effects if not isinstance(one, SendPull)]

    # -- another incarnation of a rank --

    def _is_another(self, peer: TaskId, incarnation: int) -> bool:
        return self._servers[peer].incarnation not in (0, incarnation)

    def _offer_again(self, peer: ServerSide, now: float) -> None:
        """What its former incarnation had of the open step is gone, and so may be the means that it had made."""
        if self.step <= self.word:
            return
        for bucket in peer.buckets:
            if bucket.edition >= 0 and not bucket.absent:
                bucket.busy, bucket.offers = False, 0
                bucket.go(HeldBucketTrigger.NEXT_LIFE)
                self._journal.record(now, Happening.REPEATED, self.step, bucket.id, peer.id, "of its next incarnation")

    # -- the word --

    def _has_every_mean(self) -> bool:
        return self._layout is not None and self.step > self.word and self.holds(self.step + 1)

    def _say_if_whole(self, now: float) -> list[Effect]:
        if self._waits_since is not None or not self._has_every_mean():
            return []
        self._waits_since = now
        return self._tell_coordinator(now)

    def _on_word(self, step: Step, now: float) -> list[Effect]:
        if step <= self.word:
            return []
        self.word = step
        self._waits_since = None
        for known in [one for one in self._told if one <= step]:
            del self._told[known]
        self._journal.record(now, Happening.COMMITTED, step)
        return [WordGiven(step)]

    def _tell_state(self, state: LocalState) -> list[Effect]:
        self._told[state.step] = state
        return [Send(self._coordinator, state)] if self._servers[self._coordinator].linked else []

    def _tell_coordinator(self, now: float) -> list[Effect]:
        """All that it must know before it can give the word."""
        self._ask_again_at = now + REPEAT_SECONDS
        if not self._servers[self._coordinator].linked:
            return []
        effects: list[Effect] = [Send(self._coordinator, self._told[step]) for step in sorted(self._told)]
        if self._waits_since is not None:
            effects.append(Send(self._coordinator, Applied(self.step, self._number)))
        return effects

    def _statements(self, peer: ServerSide, now: float) -> list[Effect]:
        said = super()._statements(peer, now)
        return said + self._tell_coordinator(now) if peer.id == self._coordinator else said

    def _ask_again_if_due(self, now: float) -> list[Effect]:
        if self._waits_since is None or now < self._ask_again_at:
            return []
        return self._tell_coordinator(now)

    # -- what others may ask --

    def next_deadline(self) -> float | None:
        due = [super().next_deadline(), None if self._waits_since is None else self._ask_again_at]
        return min((at for at in due if at is not None), default=None)

    def waits(self) -> list[Wait]:
        found = super().waits()
        if self._waits_since is None:
            return found
        since, state = self._waits_since, phrases.means_are_here()
        return [
            *found,
            Wait(self.task, self._coordinator, WaitKind.COMMIT, self.step, since, self._ask_again_at, state),
        ]

    def snapshot(self) -> dict[str, object]:
        return {**super().snapshot(), "word": self.word}

    def check(self) -> None:
        super().check()
        assert self.step <= self.word + 1, "a step began before the word of the one before"
