"""Machines with second homes, with one defect each. The search must find every one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lockstep.protocol.core.events import LinkLost, Tick
from lockstep.protocol.core.ids import BucketId, Incarnation, Step, TaskId, server, worker
from lockstep.protocol.core.placement import Homes
from lockstep.protocol.replication import coordination, replicated_server
from lockstep.protocol.replication.coordination import Coordination
from lockstep.protocol.replication.decisions import HeldDecisions
from lockstep.protocol.replication.replica_events import (
    CopyMade,
    MakeCopy,
    MessageHeard,
    ReplicaEffect,
    ReplicaEvent,
    StepComputed,
)
from lockstep.protocol.replication.replica_messages import (
    CopyOf,
    DecisionRecord,
    InView,
    Stamped,
    UpdateOf,
)
from lockstep.protocol.replication.replicated_server import ReplicatedServer
from lockstep.protocol.replication.replicated_worker import ReplicatedWorker
from lockstep.protocol.replication.shard_copy import ShardCopy
from lockstep.protocol.replication.shard_home import ShardHome
from lockstep.protocol.replication.speech import Speech
from lockstep.protocol.replication.viewing import Viewing
from lockstep.sim.replicas.store import ReplicaStore
from lockstep.sim.replicas.world import HarmPoint, ReplicaMaker, ReplicaScenario

# -- servers --


class GoesOnWithoutProof(ReplicatedServer):
    """A server that has waited long enough takes the other one's end for granted."""

    def _handle_one(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        if isinstance(event, Tick) and self._waiting():
            other, _ = self._waiting()[0]
            return self._on_gone(other, self.viewing.members[other], now)
        return super()._handle_one(event, now)


class TakesOverOnSilence(ReplicatedServer):
    """A deputy takes over when the link to the coordinator is lost."""

    def _handle_one(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        effects = super()._handle_one(event, now)
        if isinstance(event, LinkLost) and self.viewing.number and self.coordination is None:
            coordinator = self.viewing.placement.coordinator
            if event.peer != coordinator:
                return effects
            return self._on_gone(coordinator, self.viewing.members[coordinator], now)
        return effects


class ForgetsWhatItConfirmed(ReplicatedServer):
    """A deputy confirms decisions and keeps only the first one."""

    def _on_decided(self, peer: TaskId, life: Incarnation, record: DecisionRecord) -> list[ReplicaEffect]:
        kept = self.record
        effects = super()._on_decided(peer, life, record)
        self.record = kept or self.record
        return effects


class HearsEveryView(Viewing):
    """A message counts whichever view it was said in."""

    def admit(self, event: MessageHeard) -> InView | None:
        assert isinstance(event.message, Stamped)
        if self.number == 0:
            return None
        return super().admit(replace(event, message=replace(event.message, view=self.number)))


class DoesNotSayItAgain(ReplicatedServer):
    """What was handed on and not held is not handed on again in the next view, or over the next link."""

    def _say_what_is_open(self) -> list[ReplicaEffect]:
        return [e for e in super()._say_what_is_open() if not _is_update(e)]


def _is_update(effect: ReplicaEffect) -> bool:
    message = getattr(effect, "message", None)
    return isinstance(message, Stamped) and isinstance(message.message, UpdateOf)


# -- shards --


class DoesNotWaitForSecond(ShardHome):
    """A version is known as soon as it is made."""

    def place(self, homes: Homes, speech: Speech) -> list[ReplicaEffect]:
        self.waits_for_second = False
        return super().place(homes, speech)


class WaitsTooLate(ShardHome):
    """The second home counts as whole once it holds any bucket."""

    def on_held(self, bucket_id: BucketId, version: int, speech: Speech) -> list[ReplicaEffect]:
        effects = super().on_held(bucket_id, version, speech)
        if not self.waits_for_second:
            self.waits_for_second = True
            for bucket in self.buckets.values():
                bucket.held = bucket.sent = max(bucket.held, bucket.version)
        return effects


class ConfirmsBeforeItHolds(ShardCopy):
    """The second home confirms an update whatever it has before it."""

    def held(self, bucket: BucketId) -> int:
        return super().held(bucket) + 1


class IsWholeTooSoon(ShardHome):
    """The second home counts as whole although it lacks the version that a worker's next incarnation would ask for."""

    @property
    def may_be_called_whole(self) -> bool:
        return self.waits_for_second


# -- decisions --


class DoesNotWaitForDeputy(HeldDecisions):
    """A decision takes effect at once."""

    def decide(self, record: DecisionRecord, effects: list[ReplicaEffect]) -> list[ReplicaEffect]:
        return super().decide(record, []) + effects


class KeepsWhatWasApplied(Coordination):
    """What homes said in an earlier view still counts in the next."""

    def _new_view(self) -> list[ReplicaEffect]:
        known = dict(self._applied)
        effects = super()._new_view()
        self._applied = {index: max(step, known.get(index, step)) for index, step in self._applied.items()}
        return effects


class ForgetsStates(Coordination):
    """The workers' states are not part of what the deputy holds."""

    def _decide(self, effects: list[ReplicaEffect]) -> list[ReplicaEffect]:
        kept, self._states = self._states, {task: {} for task in self._states}
        try:
            return super()._decide(effects)
        finally:
            self._states = kept


class CommitsWithoutStates(Coordination):
    """A step is committed although a worker could not start after it."""

    def _has_states(self, step: Step) -> bool:
        return True


# -- stores, workers --


class ComputesClipAgain(ReplicaStore):
    """The second home clips by what it has itself."""

    def make_copy(self, effect: MakeCopy) -> CopyMade:
        return super().make_copy(MakeCopy(replace(effect.update, clip=None)))


class AppliesVoidSteps(ReplicaStore):
    """The second home applies what the home left out."""

    def make_copy(self, effect: MakeCopy) -> CopyMade:
        return super().make_copy(MakeCopy(replace(effect.update, void=False, mean=effect.update.mean or 7)))


class CopiesValuesOnly(ReplicaStore):
    """A copy comes without the optimizer's state."""

    def copy(self, bucket: BucketId, version: int) -> CopyOf:
        return replace(super().copy(bucket, version), state=0)


class ForgetsItsGradients(ReplicatedWorker):
    """A worker lets go of gradients as soon as they have left."""

    def _on_computed(self, event: StepComputed) -> list[ReplicaEffect]:
        effects = super()._on_computed(event)
        self._gradients = ()
        return effects


class MutantMaker(ReplicaMaker):
    """Makes machines of which one class is a mutant."""

    def __init__(self, mutant: type) -> None:
        self.mutant = mutant

    def server(self, scenario: ReplicaScenario, task: TaskId, life: Incarnation) -> ReplicatedServer:
        kind = self.mutant if issubclass(self.mutant, ReplicatedServer) else ReplicatedServer
        made: ReplicatedServer = kind(task, life, scenario.shape, scenario.buckets, digest_every=scenario.digest_every)
        if issubclass(self.mutant, Viewing):
            made.viewing = self.mutant(task, life, server(0))
        return made

    def worker(self, scenario: ReplicaScenario, task: TaskId, life: Incarnation) -> ReplicatedWorker:
        kind = self.mutant if issubclass(self.mutant, ReplicatedWorker) else ReplicatedWorker
        made: ReplicatedWorker = kind(task, life, scenario.buckets, scenario.steps)
        return made

    def store(self) -> ReplicaStore:
        kind = self.mutant if issubclass(self.mutant, ReplicaStore) else ReplicaStore
        made: ReplicaStore = kind()
        return made


MODULES = {
    ShardHome: (replicated_server, "ShardHome"),
    ShardCopy: (replicated_server, "ShardCopy"),
    Coordination: (replicated_server, "Coordination"),
    HeldDecisions: (coordination, "HeldDecisions"),
}
"""Where the small objects are made: a mutant of one is put there."""

MUTANTS: Iterable[type] = (
    GoesOnWithoutProof,
    TakesOverOnSilence,
    ForgetsWhatItConfirmed,
    HearsEveryView,
    DoesNotSayItAgain,
    DoesNotWaitForSecond,
    WaitsTooLate,
    ConfirmsBeforeItHolds,
    IsWholeTooSoon,
    DoesNotWaitForDeputy,
    KeepsWhatWasApplied,
    ForgetsStates,
    CommitsWithoutStates,
    ComputesClipAgain,
    AppliesVoidSteps,
    CopiesValuesOnly,
    ForgetsItsGradients,
)

DIRECTED: dict[type, tuple[ReplicaScenario, ...]] = {
    IsWholeTooSoon: (
        ReplicaScenario(
            seed=46,
            steps=4,
            harms=(HarmPoint(server(1), 66), HarmPoint(server(0), 155), HarmPoint(worker(1), 43)),
        ),
    )
}
"""Runs that are tried first, where three things must happen one after another."""

FOUND_AT: dict[type, int] = {
    GoesOnWithoutProof: 65,
    TakesOverOnSilence: 61,
    WaitsTooLate: 31,
    DoesNotWaitForDeputy: 30,
    KeepsWhatWasApplied: 188,
    ForgetsStates: 30,
    CommitsWithoutStates: 114,
}
"""Which of the random runs found it; that one is tried first."""
