"""Clusters without servers: every worker trains and makes the mean of its share, with two roles in one task."""

from __future__ import annotations

from collections import deque

import pytest

from helpers.reasons import because
from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.recovery import Beginning, LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import (
    Apply,
    BecameMember,
    Effect,
    GiveBack,
    GrantRegion,
    JobEnded,
    Prepare,
    Send,
    SendGradient,
    SendPull,
    SendVersion,
    VersionReady,
)
from lockstep.protocol.core.events import (
    BucketApplied,
    Event,
    Finished,
    GradientArrived,
    LinkUp,
    PeerGone,
    Prepared,
    Produced,
    Received,
    Sealed,
    StepBegun,
    TensorKind,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, Step, TaskId, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Applied, Done, Grant, Open, Pull, Saved
from lockstep.protocol.core.speakers import may_say
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine
from protocol.protocol_rigs import JOB, TICKET, CoordinatorRig, join_of, layout_of, life, plan_of

W0, W1, W2 = worker(0), worker(1), worker(2)


class Ranks:
    """Ranks whose messages and tensors arrive at once, in the order in which they were sent."""

    def __init__(
        self, count: int, buckets: int, rules: RecoveryRules | None = None, start: Step = INITIAL_STEP
    ) -> None:
        """``start``: after the initial one, a version that all ranks have from a checkpoint."""
        self.start = start
        self.now = 1.0
        self.shape = ClusterShape(0, count)
        self.plan = plan_of(buckets, count)
        self.tasks = {task: self._make(task, rules) for task in self.shape.tasks()}
        self.ready: dict[tuple[TaskId, int], int] = {}
        self.applied: list[Apply] = []
        self.ended: dict[TaskId, JobEnded] = {}
        self.arrivals = 0
        self._events: deque[tuple[TaskId, Event]] = deque()
        for task, machine in self.tasks.items():
            self._carry_out_all(task, machine.start(0.0))
        for task in self.shape.tasks():
            for peer in self.shape.tasks():
                if peer != task:
                    self._events.append((task, LinkUp(peer, life(peer))))
        self._play()

    def _make(self, task: TaskId, rules: RecoveryRules | None) -> TaskMachine:
        journal = Journal()
        first = self.shape.coordinator
        beginning = Beginning(start=self.start)
        decides = CoordinatorMachine(self.shape, JOB, journal, 0.0, rules=rules, beginning=beginning)
        coordinator = decides if task == first else None
        roles = (
            WorkerMachine(task, self.shape, journal, eager=True),
            ServerMachine(task, self.shape, journal, eager=True, averages=True),
        )
        member = MemberMachine(task, first, join_of(task), 300.0, journal, 0.0)
        return TaskMachine(life(task), member, roles, coordinator, journal)

    def tell(self, task: TaskId, event: Event) -> None:
        self._events.append((task, event))
        self._play()

    def _play(self) -> None:
        while self._events:
            name, current = self._events.popleft()
            machine = self.tasks[name]
            self._carry_out_all(name, machine.handle(current, self.now))
            machine.check()

    def _carry_out_all(self, task: TaskId, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out(task, effect)

    def _carry_out(self, task: TaskId, effect: Effect) -> None:
        tell = self._events.append
        match effect:
            case Send(peer=peer, message=message):
                assert peer != task, "a message to the task itself left it"
                tell((peer, Received(task, life(task), message)))
            case SendPull(peer=peer, version=version, have=have):
                tell((peer, Received(task, life(task), Pull(version, have, TICKET))))
            case GrantRegion(peer=peer):
                tell((peer, Received(task, life(task), Grant(TICKET))))
            case Prepare():
                tell((task, Prepared(self.plan)))
            case SendGradient(peer=peer, step=step, bucket=bucket, edition=edition):
                self.arrivals += 1
                tell((peer, GradientArrived(task, life(task), step, bucket, edition, self.arrivals)))
                tell((task, TransferEnded(peer, step, bucket, TensorKind.GRADIENT, ok=True)))
            case SendVersion(peer=peer, version=version, bucket=bucket):
                tell((peer, VersionArrived(task, version, bucket)))
                tell((task, TransferEnded(peer, version, bucket, TensorKind.VERSION, ok=True)))
            case Apply():
                self.applied.append(effect)
                tell((task, BucketApplied(effect.bucket, effect.step)))
            case VersionReady(bucket=bucket, version=version):
                self.ready[task, bucket] = version
            case BecameMember():
                tell((task, Prepared(self.plan, layout_of(self.plan, self.start))))
                if task == W0 and self.start == INITIAL_STEP:
                    for one in self.plan.buckets:
                        tell((task, Produced(INITIAL_STEP, one.id)))
            case JobEnded():
                self.ended[task] = effect
            case _:
                raise TypeError(f"a rank does not carry out {effect}")

    def step(self, step: int, *, absent: dict[TaskId, tuple[int, ...]] | None = None) -> None:
        for task in self.shape.tasks():
            self.begin_and_produce(task, step, (absent or {}).get(task, ()))

    def begin_and_produce(self, task: TaskId, step: int, absent: tuple[int, ...] = ()) -> None:
        self.tell(task, StepBegun(step, ()))
        for bucket in self.plan.buckets:
            if bucket.id not in absent:
                self.tell(task, Produced(step, bucket.id))
        self.tell(task, Sealed(step, absent, ()))

    def repeat(self) -> None:
        """Everybody says again what was not answered."""
        self.now += REPEAT_SECONDS
        for task in self.shape.tasks():
            self.tell(task, Tick())

    def versions(self) -> set[int]:
        return set(self.ready.values())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("buckets", [1, 4])
def test_ranks_average_their_gradients_step_by_step_and_end_well(count: int, buckets: int) -> None:
    ranks = Ranks(count, buckets)
    assert ranks.versions() == {0}
    for step in range(3):
        ranks.step(step)
        assert ranks.versions() == {step + 1}
        assert len(ranks.ready) == count * buckets
        made = [effect for effect in ranks.applied if effect.step == step]
        assert [effect.contributors for effect in made] == [ranks.shape.worker_ids()] * buckets
        assert {(effect.replicas, effect.rates) for effect in made} == {(count, ())}
    for task in ranks.shape.tasks():
        ranks.tell(task, Finished(3))
    assert {task: end.ok for task, end in ranks.ended.items()} == dict.fromkeys(ranks.shape.tasks(), True)


@pytest.mark.parametrize("buckets", [1, 2, 3, 4])
def test_ranks_that_start_from_a_checkpoint_commit_every_step_even_if_some_hold_no_bucket(buckets: int) -> None:
    ranks = Ranks(3, buckets, start=10)
    ranks.repeat()  # of requests that came before there was memory
    assert ranks.versions() == {10}
    coordinator = ranks.tasks[W0].coordinator
    assert coordinator is not None
    for step in range(10, 13):
        ranks.step(step)
        assert ranks.versions() == {step + 1}
        assert coordinator.committed == step


def test_each_bucket_has_its_home_on_the_worker_that_the_plan_gives_it() -> None:
    ranks = Ranks(3, 3)
    for task, machine in ranks.tasks.items():
        assert machine.server is not None
        held = [bucket["id"] for bucket in machine.server.snapshot()["buckets"]]  # type: ignore[attr-defined]
        assert held == [bucket.id for bucket in ranks.plan.buckets_of(task.index)]


def test_a_bucket_without_a_gradient_on_one_rank_is_made_of_the_others() -> None:
    ranks = Ranks(3, 2)
    ranks.step(0, absent={W1: (0,)})
    (made,) = [effect for effect in ranks.applied if (effect.step, effect.bucket) == (0, 0)]
    assert (made.contributors, made.replicas) == ((W0, W2), 3)
    assert ranks.versions() == {1}


def test_a_step_of_values_takes_the_chiefs_and_divides_by_nobody() -> None:
    """It carries what the chief gives to all, such as parameters that its program has changed."""
    ranks = Ranks(3, 2)
    for task in ranks.shape.tasks():
        ranks.tell(task, StepBegun(0, ()))
        given = ranks.plan.buckets if task == W0 else ()
        for bucket in given:
            ranks.tell(task, Produced(0, bucket.id))
        ranks.tell(task, Sealed(0, () if given else (0, 1), (), values=True))
    made = [effect for effect in ranks.applied if effect.step == 0]
    assert [(effect.contributors, effect.replicas, effect.values) for effect in made] == [((W0,), 1, True)] * 2


def test_a_bucket_is_reduced_while_backward_goes_on() -> None:
    ranks = Ranks(2, 2)
    for task in (W0, W1):
        ranks.tell(task, StepBegun(0, ()))
        ranks.tell(task, Produced(0, 0))
    assert [effect.bucket for effect in ranks.applied if effect.step == 0] == [0]


def test_what_a_rank_waits_for_names_the_other_rank_and_never_itself() -> None:
    ranks = Ranks(2, 2)
    ranks.begin_and_produce(W0, 0)
    waits = ranks.tasks[W0].waits()
    assert {(wait.on, wait.kind) for wait in waits} == {(W1, WaitKind.GRADIENT), (W1, WaitKind.PARAMETER)}
    assert {wait.on for wait in ranks.tasks[W1].waits()} == set()


def test_a_rank_alone_waits_for_its_own_step() -> None:
    ranks = Ranks(1, 2)
    assert [(wait.on, wait.kind, wait.step) for wait in ranks.tasks[W0].waits()] == [(W0, WaitKind.OWN_STEP, 0)]


def test_both_roles_are_in_the_snapshot() -> None:
    parts = Ranks(2, 2).tasks[W1].snapshot()
    assert set(parts) == {"member", "role", "share"}


def test_the_end_of_a_transfer_concerns_only_the_role_that_began_it() -> None:
    """Both send tensors with the same numbers to the same peer."""
    ranks = Ranks(2, 2)
    machine = ranks.tasks[W0]
    assert machine.server is not None
    held = []
    carry_out = ranks._carry_out

    def hold(task: TaskId, effect: Effect) -> None:
        if isinstance(effect, SendVersion) and (task, effect.peer) == (W0, W1):
            held.append(effect)
        else:
            carry_out(task, effect)

    ranks._carry_out = hold  # type: ignore[method-assign]
    ranks.step(0)
    (flying,) = held
    ended = TransferEnded(W1, flying.version, flying.bucket, TensorKind.GRADIENT, ok=True)
    ranks.tell(W0, ended)
    (mine,) = [b for b in machine.server.snapshot()["buckets"] if b["id"] == flying.bucket]  # type: ignore[attr-defined]
    assert sum(mine["readers"]) == 1


@pytest.mark.parametrize("returns", [True, False])
def test_a_lost_rank_takes_all_back_where_jobs_return_and_else_ends_the_job(returns: bool) -> None:
    """No rank comes back into the step that goes on, whatever the rules say of workers."""
    ranks = Ranks(3, 3, RecoveryRules(on_worker_loss=LossPolicy.WAIT, returns=returns))
    ranks.step(0)
    ranks.tell(W0, PeerGone(W2, because("was killed by signal 9", Cause.DEAD)))
    for task in (W0, W1):
        end = ranks.ended[task]
        assert (end.ok, end.again, end.culprit, end.reason.cause) == (False, returns, str(W2), Cause.DEAD)


@pytest.mark.parametrize(
    ("servers", "lost", "policy", "returns", "survives"),
    [
        (1, server(0), LossPolicy.WAIT, False, False),
        (1, server(0), LossPolicy.WAIT, True, True),
        (1, server(0), LossPolicy.ABORT, True, True),
        (1, W1, LossPolicy.WAIT, False, True),
        (1, W1, LossPolicy.SHRINK, False, True),
        (1, W1, LossPolicy.ABORT, True, False),
        (0, W1, LossPolicy.WAIT, False, False),
        (0, W1, LossPolicy.WAIT, True, True),
        (0, W1, LossPolicy.ABORT, True, True),
        (0, W0, LossPolicy.WAIT, True, True),
        (0, W0, LossPolicy.WAIT, False, False),
    ],
)
def test_after_which_losses_a_job_goes_on(
    servers: int, lost: TaskId, policy: LossPolicy, returns: bool, survives: bool
) -> None:
    shape = ClusterShape(servers, 2)
    assert RecoveryRules(on_worker_loss=policy, returns=returns).of(shape).survives(lost, shape) is survives


RETURNS, SAVES = RecoveryRules(returns=True), RecoveryRules(returns=True, saves_last=True)


@pytest.mark.parametrize(
    ("rules", "done", "back"),
    [
        (RETURNS, (), True),
        (RETURNS, (W2,), True),  # the others may still need the last means of its share
        (RETURNS, (W2, W1), True),
        (SAVES, (W2, W1, W0), True),  # nothing is saved yet
        (RecoveryRules(), (W2,), False),
    ],
)
def test_a_rank_that_has_made_all_its_steps_is_missed_until_nobody_needs_it(
    rules: RecoveryRules, done: tuple[TaskId, ...], back: bool
) -> None:
    rig = CoordinatorRig(servers=0, workers=3, rules=rules)
    rig.join_all()
    for task in done:
        rig.hear(task, Done(1))
    rig.tell(PeerGone(W2, because("was killed"), life(W2)))
    assert rig.machine.end is not None
    assert (rig.machine.end.ok, rig.machine.end.again) == (False, back)


def test_a_rank_is_not_missed_when_all_have_made_all_steps() -> None:
    rig = CoordinatorRig(servers=0, workers=3, rules=RETURNS)
    rig.join_all()
    for task in (W0, W1, W2):
        rig.hear(task, Done(1))
    assert rig.machine.end is not None
    assert rig.machine.end.ok
    assert rig.tell(PeerGone(W2, because("was killed"), life(W2))) == []


def test_only_the_first_rank_saves() -> None:
    """Every rank has all parameters."""
    ranks = Ranks(3, 3, RecoveryRules(save_steps=1))
    assert ranks.shape.savers == (W0,)
    coordinator = ranks.tasks[W0].coordinator
    assert coordinator is not None
    coordinator.saving.begin(1, (), 1.0)
    assert coordinator.saving.missing() == (W0,)
    assert not coordinator.saving.lacks(W1)


def test_without_servers_workers_say_what_servers_say() -> None:
    said = (Grant(TICKET), Open(0, ()), Applied(0), Saved(1, "", 0, ""))
    assert all(may_say(W1, message, W0) for message in said)
    assert not any(may_say(W1, message, server(0)) for message in said)


def test_homes_are_the_servers_or_all_workers() -> None:
    assert ClusterShape(2, 3).homes == (server(0), server(1))
    assert ClusterShape(0, 2).homes == (W0, W1)
    assert ClusterShape(2, 3).savers == (server(0), server(1))


# -- versions arrive with a number, as gradients do --


def test_a_lent_version_is_ready_under_its_number_and_a_refused_one_is_given_back() -> None:
    shape, journal = ClusterShape(1, 1), Journal()
    plan = plan_of(1, 1)
    machine = WorkerMachine(W0, shape, journal, eager=True)
    machine.handle(LinkUp(server(0), life(server(0))), 1.0)
    machine.handle(Prepared(plan, layout_of(plan)), 1.0)
    arrived = VersionArrived(server(0), 0, 0, 7)
    assert machine.handle(arrived, 2.0) == [VersionReady(0, 0, 7)]
    assert machine.handle(VersionArrived(server(0), 0, 0, 8), 3.0) == [GiveBack(8)]
    assert machine.handle(VersionArrived(server(0), 0, 0), 4.0) == [], "in the arena: nothing to give back"
