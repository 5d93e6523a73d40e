"""Machines with one defect each. The simulator must find every one of them."""

from __future__ import annotations

from dataclasses import replace

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.recovery import Beginning
from lockstep.protocol.core.effects import Apply, Effect
from lockstep.protocol.core.events import (
    GradientArrived,
    LinkLost,
    LinkUp,
    Received,
    Sealed,
    StepBegun,
    VersionArrived,
)
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, JobId, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Applied, Commit
from lockstep.protocol.core.timing import RESEND_SECONDS
from lockstep.protocol.server.async_server_machine import AsyncServerMachine
from lockstep.protocol.server.gradients import CollectedGradients
from lockstep.protocol.server.ledger import Ledger, WorkerSide
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine
from lockstep.sim.machines import MachineMaker
from lockstep.sim.scenario import Scenario


class CountsWithoutSender(ServerMachine):
    """An arrival counts for whoever is still missing."""

    def _on_gradient_arrived(self, event: GradientArrived, now: float) -> list[Effect]:
        ledger = self._ledgers.get(event.bucket)
        if ledger is not None and event.step == ledger.version:
            waiting = [w for w in self.contributing.of(event.step) if w not in ledger.arrived]
            sender = waiting[0] if waiting else event.peer
            event = replace(event, peer=sender, incarnation=self._workers[sender].incarnation)
        return super()._on_gradient_arrived(event, now)


class CountsAnyLife(ServerMachine):
    """A gradient counts whichever life of its sender it is of."""

    def _why_refused(self, event: GradientArrived, ledger: Ledger | None) -> str | None:
        return super()._why_refused(replace(event, incarnation=self._workers[event.peer].incarnation), ledger)


class CountsAnyStep(ServerMachine):
    """A gradient counts whichever step it is of."""

    def _why_refused(self, event: GradientArrived, ledger: Ledger | None) -> str | None:
        step = event.step if ledger is None or ledger.version == INITIAL_STEP else ledger.version
        return super()._why_refused(replace(event, step=step), ledger)


class DoesNotWaitForTheCommit(ServerMachine):
    """The version before is overwritten although another server has not completed its step."""

    def _may_apply(self, ledger: Ledger) -> bool:
        known, self.committed = self.committed, ledger.version
        try:
            return super()._may_apply(ledger)
        finally:
            self.committed = known


class DoesNotWaitForReaders(AsyncServerMachine):
    """A slot is overwritten while it is being sent. (With synchronous steps the workers' own progress forbids that.)"""

    def _apply_if_possible(self, ledger: Ledger, now: float) -> list[Effect]:
        readers, ledger.readers = ledger.readers, [0] * len(ledger.readers)
        try:
            return super()._apply_if_possible(ledger, now)
        finally:
            ledger.readers = readers


class OverwritesWhatIsRead(ServerMachine):
    """The only slot is overwritten while it is being sent."""

    def _may_apply(self, ledger: Ledger) -> bool:
        readers, ledger.readers = ledger.readers, [0] * len(ledger.readers)
        try:
            return super()._may_apply(ledger)
        finally:
            ledger.readers = readers


class KeepsNormsOfReplacedGradients(CollectedGradients):
    """What was measured ahead counts, although a gradient was edited afterwards."""

    def _give_back(self, ledger: Ledger, sender: TaskId) -> list[Effect]:
        right, self._norm.forget = self._norm.forget, lambda: None  # type: ignore[method-assign]
        try:
            return super()._give_back(ledger, sender)
        finally:
            self._norm.forget = right  # type: ignore[method-assign]


class AnswersForItsPeer(ServerMachine):
    """A rank's own gradient counts for the rank that is missing."""

    def _on_gradient_arrived(self, event: GradientArrived, now: float) -> list[Effect]:
        ledger = self._ledgers.get(event.bucket)
        if event.peer == self.task and ledger is not None and event.step == ledger.version != INITIAL_STEP:
            missing = [w for w in self.contributing.of(event.step) if w not in ledger.arrived]
            event = replace(event, peer=missing[-1], incarnation=self._workers[missing[-1]].incarnation)
        return super()._on_gradient_arrived(event, now)


class UpdatesInPlace(ServerMachine):
    """The next version is written over the one it is made of."""

    def _apply_if_possible(self, ledger: Ledger, now: float) -> list[Effect]:
        effects = super()._apply_if_possible(ledger, now)
        return [
            replace(effect, to_slot=effect.from_slot) if isinstance(effect, Apply) else effect for effect in effects
        ]


class AppliesBeforeTheSeal(ServerMachine):
    """What may still be edited is applied."""

    def _sealed(self, ledger: Ledger) -> bool:
        return True


class KeepsReplacedEditions(CollectedGradients):
    """An edition that was replaced stays where it is, and its sender cannot send the final one."""

    def keep_only_sealed(self, ledger: Ledger, side: WorkerSide) -> list[Effect]:
        known = ledger.arrived.get(side.id)
        return [] if known is not None else super().keep_only_sealed(ledger, side)


class SleepsThroughTheCommit(ServerMachine):
    """A lost wake-up: buckets that waited for the commit are not looked at again when it comes."""

    def _on_commit(self, event: Received, commit: Commit, now: float) -> list[Effect]:
        self.committed = max(self.committed, commit.step)
        self._applied_at = None
        return []


class SpeaksOnce(ServerMachine):
    """What the coordinator must know is said once, and may be lost."""

    def _say_what_is_unheard(self, now: float) -> list[Effect]:
        effects = super()._say_what_is_unheard(now)
        self._repeat_at = 1e9
        return effects

    def _on_link_up(self, event: LinkUp, now: float) -> list[Effect]:
        effects = super()._on_link_up(event, now)
        return [] if event.peer == self.shape.coordinator else effects


class AppliesTwice(AsyncServerMachine):
    """Without synchronisation: a gradient that comes twice is applied twice."""

    def _queued(self, worker: TaskId, bucket: int) -> bool:
        return False


class SendsTwice(AsyncServerMachine):
    """Without synchronisation: what was sent is sent again with another value, into memory that is in use."""

    def _may_repeat(self, seconds: float, times: int) -> bool:
        return seconds >= RESEND_SECONDS


class CommitsEarly(CoordinatorMachine):
    """A step is committed when the first server has applied it."""

    def _on_applied(self, peer: TaskId, message: Applied, now: float) -> list[Effect]:
        self._applied = dict.fromkeys(self._applied, message.step)
        return super()._on_applied(peer, message, now)


class SaysTheEndOnce(CoordinatorMachine):
    """A server whose link is down at the end is never told of it."""

    def _on_link_up(self, event: LinkUp) -> list[Effect]:
        return []


class ForgetsWhatWasInFlight(WorkerMachine):
    """After a new link, what the former one lost is taken for delivered."""

    def _on_link_lost(self, event: LinkLost, now: float) -> list[Effect]:
        states = [bucket.state for bucket in self._buckets]
        effects = super()._on_link_lost(event, now)
        for bucket, state in zip(self._buckets, states, strict=True):
            bucket.state = state
            bucket.offered_at = 1e9
        return effects


class TakesAnyVersion(WorkerMachine):
    """Whatever version arrives is taken for the one that was asked for."""

    def _on_version_arrived(self, event: VersionArrived, now: float) -> list[Effect]:
        bucket = self._buckets[event.bucket]
        return super()._on_version_arrived(replace(event, version=max(event.version, bucket.version + 1)), now)


class SaysFormerRates(WorkerMachine):
    """Until the seal, a new link tells the rates of the step before."""

    def _on_step_begun(self, event: StepBegun, now: float) -> list[Effect]:
        former = self._stated.rates
        effects = super()._on_step_begun(event, now)
        if former is not None and not event.rates:
            self._stated.rates = replace(former, step=event.step)
        return effects


class SealsOnlyWhatHasLeft(WorkerMachine):
    """What follows the seal counts as having no gradient."""

    def _send_seals(self, event: Sealed, absent: set[BucketId]) -> list[Effect]:
        return super()._send_seals(event, absent | {bucket.id for bucket in self._buckets if bucket.edition < 0})


class Plant(MachineMaker):
    """Makes a cluster in which every machine of one kind has the defect."""

    def __init__(self, mutant: type) -> None:
        self._mutant = mutant

    def worker(self, scenario: Scenario, task: TaskId, journal: Journal) -> WorkerMachine:
        machine = super().worker(scenario, task, journal)
        self._plant(machine)
        return machine

    def server(self, scenario: Scenario, task: TaskId, journal: Journal) -> ServerMachine:
        machine = super().server(scenario, task, journal)
        self._plant(machine)
        self._plant(machine._gradients)
        return machine

    def coordinator(
        self, scenario: Scenario, job: JobId, journal: Journal, now: float, beginning: Beginning
    ) -> CoordinatorMachine:
        machine = super().coordinator(scenario, job, journal, now, beginning)
        self._plant(machine)
        return machine

    def _plant(self, machine: object) -> None:
        """The defects add methods and no state, so a machine can become one."""
        if issubclass(self._mutant, type(machine)):
            machine.__class__ = self._mutant
