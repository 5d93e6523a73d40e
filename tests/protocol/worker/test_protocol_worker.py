"""The worker's machine, transition by transition."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from lockstep.protocol.core.effects import Send, SendGradient, SendPull, VersionReady
from lockstep.protocol.core.errors import LocalProtocolError, RemoteProtocolError
from lockstep.protocol.core.events import (
    Finished,
    LinkLost,
    LinkUp,
    Prepared,
    Produced,
    Sealed,
    StepBegun,
    TensorKind,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, TaskId, server, worker
from lockstep.protocol.core.journal import Happening
from lockstep.protocol.core.messages import Done, Edition, Grant, Layout, Open, Rates, Seal, View
from lockstep.protocol.core.placement import Homes
from lockstep.protocol.core.timing import REPEAT_SECONDS, RESEND_SECONDS
from lockstep.protocol.phrases import wait_line
from lockstep.protocol.worker.holdings import HELD_BUCKET_TRANSITIONS, HeldBucketState, HeldBucketTrigger, ServerSide
from lockstep.protocol.worker.rank_machine import RankMachine
from protocol.protocol_rigs import RATES, TICKET, WorkerRig, life, messages_to, only, plan_of

PS = server(0)
LOST = LinkLost(PS, "connection reset")


def in_state(state: HeldBucketState, *, eager: bool = False) -> WorkerRig:
    """A worker whose only bucket is in ``state``, in step 0 where it can be."""
    rig = WorkerRig(eager=eager)
    rig.grant_and_open(INITIAL_STEP)
    if state is HeldBucketState.WANTED:
        return rig
    rig.begin(0)
    if state is not HeldBucketState.HELD:
        rig.produce(0)
    if state in (HeldBucketState.OFFERED, HeldBucketState.CONFIRMED):
        rig.hear(PS, Open(0, ()))
    if state is HeldBucketState.CONFIRMED:
        rig.hear(PS, Open(0, (0,)))
    assert rig.state() == state.value
    return rig


def _seal(rig: WorkerRig, *absent: int) -> None:
    rig.tell(Sealed(0, absent, ()))


def _arrive(rig: WorkerRig) -> None:
    if rig.machine.step == 0:
        _seal(rig)
        rig.tell(VersionArrived(PS, 1, 0))
    else:
        rig.tell(VersionArrived(PS, 0, 0))


def _produce(rig: WorkerRig) -> None:
    # While the former transfer runs, the new edition cannot leave, and the state can be seen.
    rig.produce(rig.machine.step)


def _rehome(rig: WorkerRig) -> None:
    """A view in which the second home of the only shard, another server, has it."""
    rig.machine._servers[server(1)] = ServerSide(server(1))
    rig.hear(PS, View(77, 2, (), shards=(Homes(1),), decisions=(Homes(1),)))


def _next_life(rig: WorkerRig) -> None:
    """As a rank does it; a mean may have come back for what was sent."""
    rank, home = cast(RankMachine, rig.machine), rig.machine._servers[PS]
    rank.word, rig.machine._buckets[0].edition, home.grant = INITIAL_STEP - 1, 0, None
    RankMachine._offer_again(rank, home, 0.0)


TRIGGERS: dict[HeldBucketTrigger, Callable[[WorkerRig], object]] = {
    HeldBucketTrigger.ARRIVE: _arrive,
    HeldBucketTrigger.PRODUCE: _produce,
    HeldBucketTrigger.SKIP: lambda rig: _seal(rig, 0),
    HeldBucketTrigger.START: lambda rig: rig.hear(PS, Open(0, ())),
    HeldBucketTrigger.FAIL: lambda rig: rig.tell(LOST),
    HeldBucketTrigger.CONFIRM: lambda rig: rig.hear(PS, Open(0, (0,))),
    HeldBucketTrigger.REHOME: _rehome,
    HeldBucketTrigger.NEXT_LIFE: _next_life,
}


@pytest.mark.parametrize(("pair", "after"), HELD_BUCKET_TRANSITIONS.items(), ids=lambda value: str(value))
def test_every_row_of_the_table_can_be_walked(
    pair: tuple[HeldBucketState, HeldBucketTrigger], after: HeldBucketState
) -> None:
    before, trigger = pair
    rig = in_state(before)
    if before is HeldBucketState.WANTED and trigger is HeldBucketTrigger.PRODUCE:
        # Only the initial parameters of the chief leave before a version is here.
        rig.tell(LOST)
    TRIGGERS[trigger](rig)
    assert rig.state() == after.value


def test_a_prepared_worker_announces_its_model_and_asks_for_version_0() -> None:
    rig = WorkerRig(index=1, buckets=2)
    assert len(messages_to(rig.prepared, PS, Layout)) == 1
    assert only(rig.prepared, SendPull) == [SendPull(PS, 0, ())]
    assert rig.machine.next_deadline() == rig.now + REPEAT_SECONDS


def test_the_chief_sends_initial_parameters_once_the_server_has_opened_the_initial_step() -> None:
    rig = WorkerRig()
    assert only(rig.produce(INITIAL_STEP), SendGradient) == []
    rig.hear(PS, Grant(TICKET))
    assert only(rig.hear(PS, Open(INITIAL_STEP, ())), SendGradient) == [SendGradient(PS, INITIAL_STEP, 0, 0, TICKET)]


@pytest.mark.parametrize("order", [(Grant(TICKET), Open(0, ())), (Open(0, ()), Grant(TICKET))])
def test_a_gradient_leaves_only_with_grant_and_open_in_whichever_order(order: tuple[Grant | Open, ...]) -> None:
    rig = WorkerRig()
    rig.begin(0)
    rig.produce(0)
    assert only(rig.hear(PS, order[0]), SendGradient) == []
    assert only(rig.hear(PS, order[1]), SendGradient) == [SendGradient(PS, 0, 0, 0, TICKET)]


def test_an_eager_worker_asks_for_the_next_version_when_it_begins_and_a_sealing_one_when_it_seals() -> None:
    eager, sealing = WorkerRig(), WorkerRig(eager=False)
    assert only(eager.begin(0), SendPull) == [SendPull(PS, 1, ())]
    assert only(sealing.begin(0), SendPull) == []
    assert only(sealing.tell(Sealed(0, (), ())), SendPull) == [SendPull(PS, 1, ())]


def test_a_version_is_ready_once_and_a_repeated_one_is_dropped() -> None:
    rig = WorkerRig()
    arrived = VersionArrived(PS, 0, 0)
    assert rig.tell(arrived) == [VersionReady(0, 0)]
    assert rig.tell(arrived) == []
    assert rig.drops() == ["stale version"]


def test_a_version_of_another_step_is_dropped() -> None:
    rig = WorkerRig()
    assert rig.tell(VersionArrived(PS, 1, 0)) == []
    assert rig.drops() == ["stale version"]


@pytest.mark.parametrize(("peer", "bucket"), [(server(0), 2), (server(1), 0), (server(0), -1)])
def test_a_version_of_a_bucket_that_the_server_does_not_own_is_dropped(peer: TaskId, bucket: int) -> None:
    rig = WorkerRig(servers=2, buckets=2)
    assert rig.tell(VersionArrived(peer, 0, bucket)) == []
    assert rig.drops() == ["not a bucket of this server"]


def test_have_names_the_buckets_that_need_not_be_sent_again() -> None:
    rig = WorkerRig(buckets=2)
    rig.tell(VersionArrived(PS, 0, 1))
    rig.now += REPEAT_SECONDS
    assert only(rig.tell(Tick()), SendPull) == [SendPull(PS, 0, (1,))]


def test_a_request_is_repeated_until_it_is_satisfied() -> None:
    rig = WorkerRig(index=1)
    rig.hear(PS, Grant(TICKET))
    for _ in range(3):
        rig.now += REPEAT_SECONDS
        assert only(rig.tell(Tick()), SendPull) == [SendPull(PS, 0, ())]
    rig.receive_version(0)
    assert rig.machine.next_deadline() is None
    assert rig.machine.holds(0)
    assert not rig.machine.holds(1)


def test_a_server_without_buckets_is_asked_for_its_grant_until_it_answers() -> None:
    """Otherwise a lost announcement would keep it from ever telling the coordinator that it holds nothing."""
    rig = WorkerRig(servers=2, buckets=1)
    rig.receive_version(0)
    rig.hear(PS, Grant(TICKET))
    rig.now += REPEAT_SECONDS
    assert len(messages_to(rig.tell(Tick()), server(1), Layout)) == 1
    rig.hear(server(1), Grant(TICKET))
    assert rig.machine.next_deadline() is None


def test_a_transfer_that_failed_is_started_again() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    failed = rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=False))
    assert only(failed, SendGradient) == [SendGradient(PS, 0, 0, 0, TICKET)]


def test_a_failed_transfer_of_a_former_step_changes_nothing() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    _arrive(rig)
    rig.tell(StepBegun(1, RATES))
    assert rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=False)) == []
    assert rig.state() == HeldBucketState.HELD.value


def test_a_bucket_waits_for_the_end_of_its_former_transfer() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    _arrive(rig)
    rig.tell(StepBegun(1, RATES))
    rig.hear(PS, Open(1, ()))
    assert only(rig.produce(1), SendGradient) == []
    ended = rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=True))
    assert only(ended, SendGradient) == [SendGradient(PS, 1, 0, 0, TICKET)]


def test_an_edited_bucket_is_sent_again_as_the_next_edition_and_sealed_so() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    rig.produce(0)
    sent = only(rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=True)), SendGradient)
    assert [effect.edition for effect in sent] == [1]
    seals = messages_to(rig.tell(Sealed(0, (), RATES)), PS, Seal)
    assert [(seal.step, seal.absent, seal.editions) for seal in seals] == [(0, (), (Edition(0, 1),))]


def test_that_a_server_has_the_first_edition_does_not_confirm_the_second() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    rig.produce(0)
    rig.hear(PS, Open(0, (0,)))
    assert rig.state() == HeldBucketState.PRODUCED.value


def test_a_gradient_that_is_still_asked_for_is_sent_again_after_growing_patience() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=True))
    for patience in (RESEND_SECONDS, 2 * RESEND_SECONDS):
        rig.now += patience - 0.1
        assert only(rig.hear(PS, Open(0, ())), SendGradient) == []
        rig.now += 0.1
        assert len(only(rig.hear(PS, Open(0, ())), SendGradient)) == 1
        rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=True))


def test_an_open_of_a_former_step_is_dropped() -> None:
    rig = in_state(HeldBucketState.OFFERED)
    assert rig.hear(PS, Open(INITIAL_STEP, ())) == []
    assert rig.drops() == ["stale open"]


def test_a_server_that_is_two_steps_ahead_has_broken_the_protocol() -> None:
    rig = WorkerRig()
    rig.begin(0)
    with pytest.raises(RemoteProtocolError, match=r"opened step 2 while .* is in step 0"):
        rig.hear(PS, Open(2, ()))


def test_the_next_step_may_be_opened_before_it_is_begun() -> None:
    rig = in_state(HeldBucketState.CONFIRMED, eager=True)
    rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=True))
    rig.hear(PS, Open(1, ()))
    rig.tell(VersionArrived(PS, 1, 0))
    rig.tell(StepBegun(1, RATES))
    assert only(rig.produce(1), SendGradient) == [SendGradient(PS, 1, 0, 0, TICKET)]


def test_messages_of_another_life_of_a_server_are_ignored() -> None:
    rig = WorkerRig()
    rig.begin(0)
    rig.produce(0)
    rig.hear(PS, Grant(TICKET), incarnation=life(PS) + 1)
    assert rig.hear(PS, Open(0, ()), incarnation=life(PS) + 1) == []
    assert rig.state() == HeldBucketState.PRODUCED.value


def test_after_a_new_link_everything_the_server_must_know_is_said_again() -> None:
    rig = WorkerRig(eager=False)
    rig.grant_and_open(INITIAL_STEP)
    rig.begin(0)
    rig.produce(0)
    rig.tell(Sealed(0, (), RATES))
    rig.tell(LOST)
    said = rig.tell(LinkUp(PS, life(PS)))
    assert [type(effect.message) for effect in said if isinstance(effect, Send)] == [Layout, Rates, Seal]
    assert only(said, SendPull) == [SendPull(PS, 1, ())]
    # Nothing of the former link holds any more: not the grant, not the open step.
    assert only(rig.hear(PS, Open(0, ())), SendGradient) == []
    assert len(only(rig.hear(PS, Grant(TICKET)), SendGradient)) == 1


def test_rates_that_come_with_the_seal_are_not_those_of_the_step_before() -> None:
    """A link that comes back between the two would otherwise tell the server last step's rates for this step."""
    rig = WorkerRig(eager=False)
    rig.begin(0)
    rig.produce(0)
    rig.tell(Sealed(0, (), RATES))
    rig.receive_version(1)
    rig.tell(StepBegun(1, ()))
    rig.tell(LOST)
    assert messages_to(rig.tell(LinkUp(PS, life(PS))), PS, Rates) == []


def test_an_absent_bucket_is_told_to_its_own_server_only() -> None:
    rig = WorkerRig(servers=2, buckets=2)
    rig.begin(0)
    rig.produce(0, 0)
    sealed = rig.tell(Sealed(0, (1,), ()))
    assert [seal.absent for seal in messages_to(sealed, server(0), Seal)] == [()]
    assert [seal.absent for seal in messages_to(sealed, server(1), Seal)] == [(1,)]
    assert rig.state(1) == HeldBucketState.CONFIRMED.value


def test_an_eager_worker_without_absent_buckets_needs_no_seal() -> None:
    rig = WorkerRig()
    rig.begin(0)
    rig.produce(0)
    assert messages_to(rig.tell(Sealed(0, (), ())), PS, Seal) == []


def test_an_eager_bucket_can_neither_be_edited_nor_taken_back() -> None:
    """The server may have applied it: a second edition would be refused there, and the edit lost in silence."""
    rig = in_state(HeldBucketState.OFFERED, eager=True)
    with pytest.raises(LocalProtocolError, match="bucket 0 of step 0 was produced again after it may have been"):
        rig.produce(0)
    with pytest.raises(LocalProtocolError, match="bucket 0 of step 0 was taken back after it may have been"):
        rig.tell(Sealed(0, (0,), ()))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (StepBegun(2, ()), "began step 2 after step 0"),
        (Produced(1, 0), "bucket 0 of step 1 was produced in step 0"),
        (Sealed(1, (), ()), "sealed step 1 in step 0"),
    ],
)
def test_a_training_loop_that_is_out_of_order_is_told(event: StepBegun | Produced | Sealed, text: str) -> None:
    rig = WorkerRig()
    rig.begin(0)
    with pytest.raises(LocalProtocolError, match=text):
        rig.tell(event)


def test_a_gradient_from_another_version_than_its_step_is_a_defect() -> None:
    rig = WorkerRig(eager=False)
    rig.tell(StepBegun(0, ()))
    with pytest.raises(LocalProtocolError, match="gradient of step 0 from version -1"):
        rig.produce(0)


def test_a_finished_worker_tells_its_servers_and_tells_them_again_on_a_new_link() -> None:
    rig = WorkerRig()
    rig.receive_version(0)
    assert messages_to(rig.tell(Finished(0)), PS, Done) == [Done(0)]
    rig.tell(LOST)
    assert messages_to(rig.tell(LinkUp(PS, life(PS))), PS, Done) == [Done(0)]


def test_a_wait_names_the_tensor_the_server_and_the_step() -> None:
    rig = WorkerRig(index=1, servers=2, buckets=2)
    rig.tell(VersionArrived(server(1), 0, 1))
    (wait,) = rig.machine.waits()
    assert (wait.waiter, wait.on, wait.step) == (worker(1), server(0), INITIAL_STEP)
    key = wait.key
    assert key is not None
    assert (key.source, key.incarnation, key.name) == (PS, life(PS), "parameter/bucket_0")
    assert wait_line(wait, rig.now + 1.5).startswith("worker 1 has been waiting 1.5 s for")


def test_a_wait_on_a_lost_link_says_so() -> None:
    rig = WorkerRig()
    rig.tell(LOST)
    assert [wait.state for wait in rig.machine.waits()] == ["not connected"]


def test_events_of_servers_that_are_not_there_change_nothing() -> None:
    rig = WorkerRig()
    assert rig.tell(LinkUp(server(7), 5)) == []
    assert rig.tell(LinkLost(server(7), "")) == []
    assert rig.hear(server(7), Open(0, ())) == []


def test_a_link_that_comes_before_the_model_is_used_once_the_model_is_there() -> None:
    rig = WorkerRig(servers=1)
    late = type(rig.machine)(worker(1), ClusterShape(1, 2), rig.journal, eager=True)
    assert late.handle(LinkUp(PS, life(PS)), 1.0) == []
    assert late.next_deadline() is None
    plan = plan_of(1, 1)
    effects = late.handle(Prepared(plan, Layout(plan.hash, 64, plan.parameters, ())), 2.0)
    assert [type(effect) for effect in effects] == [Send, SendPull]


def test_the_life_of_a_gradient_is_in_the_journal() -> None:
    rig = in_state(HeldBucketState.OFFERED, eager=True)
    rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, ok=True))
    rig.tell(VersionArrived(PS, 1, 0))
    seen = [r.happening for r in rig.journal if r.step in (0, 1) and r.bucket == 0]
    assert seen == [
        Happening.ARRIVED,
        Happening.PRODUCED,
        Happening.IN_FLIGHT,
        Happening.SENT,
        Happening.ARRIVED,
    ]


# -- backup workers --


def test_a_worker_that_was_left_behind_asks_for_the_newest_version_and_begins_its_step() -> None:
    rig = WorkerRig(index=1, servers=2, buckets=2, eager=False, may_lag=True)
    rig.grant_and_open(0)
    rig.receive_version(0)
    rig.tell(StepBegun(0, ()))
    rig.tell(Sealed(0, (0, 1), ()))
    rig.tell(VersionArrived(server(0), 1, 0))
    # Both servers have gone on without this worker; the version it waits for exists no more.
    assert only(rig.hear(server(1), Open(4, ())), SendPull) == [SendPull(server(0), 4, ()), SendPull(server(1), 4, ())]
    assert rig.receive_version(4) == [VersionReady(0, 4), VersionReady(1, 4)]
    rig.tell(StepBegun(4, ()))
    assert rig.machine.step == 4


def test_a_worker_that_is_never_left_behind_may_not_leave_out_a_step() -> None:
    rig = WorkerRig(index=1)
    rig.receive_version(0)
    with pytest.raises(LocalProtocolError, match="began step 4 after step -1"):
        rig.tell(StepBegun(4, ()))


def test_an_open_that_comes_before_its_view_counts_as_soon_as_the_view_is_here() -> None:
    """With three servers they come over different links. Forgotten, it would be said again two seconds later."""
    rig, next_home = in_state(HeldBucketState.OFFERED), server(1)
    side = rig.machine._servers[next_home] = ServerSide(next_home, life(next_home), linked=True, grant=TICKET)
    rig.tell(TransferEnded(PS, 0, 0, TensorKind.GRADIENT, True))
    assert rig.hear(next_home, Open(0, (), view=2)) == []
    assert side.open_step < 0
    effects = rig.hear(PS, View(77, 2, (), shards=(Homes(1),), decisions=(Homes(1),)))
    assert [(one.peer, one.step) for one in effects if isinstance(one, SendGradient)] == [(next_home, 0)]


def test_an_early_open_is_forgotten_with_its_link() -> None:
    rig, next_home = in_state(HeldBucketState.OFFERED), server(1)
    rig.machine._servers[next_home] = ServerSide(next_home, life(next_home), linked=True, grant=TICKET)
    rig.hear(next_home, Open(0, (), view=2))
    rig.tell(LinkLost(next_home, "connection reset"))
    effects = rig.hear(PS, View(77, 2, (), shards=(Homes(1),), decisions=(Homes(1),)))
    assert not [one for one in effects if isinstance(one, SendGradient)]
    assert rig.machine._servers[next_home].open_step < 0
