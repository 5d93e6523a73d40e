"""The synchronous server's machine, transition by transition."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import Apply, Effect, GiveBack, GrantRegion, Prepare, Send, SendVersion
from lockstep.protocol.core.events import LinkLost, LinkUp, Prepared, TensorKind, Tick, TransferEnded
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, NOTHING_TO_APPLY, Step, TaskId, server, worker
from lockstep.protocol.core.messages import Applied, Commit, Done, Failed, Open, Rates
from lockstep.protocol.core.timing import REPEAT_SECONDS, RESEND_SECONDS
from lockstep.protocol.phrases import waited_for
from lockstep.protocol.server.ledger import ServedBucketState
from protocol.protocol_rigs import RATES, TICKET, ServerRig, layout_of, life, messages_to, only, plan_of
from protocol.server.ready_server import ready

W0, W1 = worker(0), worker(1)


def do_step(rig: ServerRig, step: int) -> list[Effect]:
    """One whole step of a server with one bucket."""
    rig.say_rates(step)
    for index in range(rig.shape.workers):
        rig.arrive(index, step)
    effects = rig.applied(step)
    rig.commit(step)
    return effects


# -- getting ready --


def test_only_the_chiefs_layout_is_prepared_and_only_once() -> None:
    rig = ServerRig()
    layout = layout_of(rig.plan)
    assert rig.hear(W1, layout) == []
    assert rig.hear(W0, layout) == [Prepare(layout)]
    assert rig.hear(W0, layout) == []


def test_when_memory_is_there_every_announced_worker_gets_its_grant_and_the_chief_is_asked_for_version_0() -> None:
    rig = ServerRig()
    effects = rig.prepare()
    assert only(effects, GrantRegion) == [GrantRegion(W0), GrantRegion(W1)]
    assert only(effects, Send) == [Send(W0, Open(INITIAL_STEP, ()))]
    assert rig.tell(Prepared(rig.plan)) == []


def test_a_worker_that_announces_itself_later_or_again_gets_its_grant_and_the_open_step() -> None:
    rig = ServerRig()
    rig.initialise()
    for _ in range(2):
        assert rig.hear(W1, layout_of(rig.plan)) == [GrantRegion(W1), Send(W1, Open(0, ()))]


def test_a_worker_that_has_not_come_is_awaited_since_the_memory_is_there() -> None:
    """Not since the clock began: a wait that long ends the job."""
    rig = ServerRig(absent={W1})
    rig.hear(W0, layout_of(rig.plan, start=8))
    rig.tell(Prepared(rig.plan))
    assert {wait.on: wait.since for wait in rig.machine.waits()}[W1] == rig.now


def test_a_worker_with_another_model_breaks_the_job_and_the_first_difference_is_named() -> None:
    rig = ServerRig(workers=2, buckets=3)
    rig.hear(W0, layout_of(rig.plan))
    rig.tell(Prepared(rig.plan))
    other = plan_of(2, 1)
    (failed,) = messages_to(rig.hear(W1, layout_of(other)), server(0), Failed)
    assert failed.culprit == str(W1)
    assert "3 parameters, the other 2" in failed.reason.text
    assert "'layer2.weight' (16 x float32, group 0)" in failed.reason.text
    assert "build the same model" in failed.reason.text


def test_a_failure_is_said_again_until_the_job_ends() -> None:
    """Said once, it could be lost with the link, and everybody would wait for a worker that was never admitted."""
    rig = ServerRig(buckets=2)
    rig.hear(W0, layout_of(rig.plan))
    rig.tell(Prepared(rig.plan))
    rig.hear(W1, layout_of(plan_of(1, 1)))
    rig.now += REPEAT_SECONDS
    assert len(messages_to(rig.tell(Tick()), server(0), Failed)) == 1
    assert rig.machine.next_deadline() is not None


@pytest.mark.parametrize("start", [INITIAL_STEP, 10])
def test_a_server_without_buckets_says_that_it_has_nothing_to_apply_until_a_commit_shows_that_it_was_heard(
    start: Step,
) -> None:
    """Also in a job that starts from a checkpoint: what was committed before it shows nothing."""
    rig = ServerRig(servers=2, buckets=1, index=1)
    told = Send(server(0), Applied(NOTHING_TO_APPLY))
    assert told in rig.prepare(start)
    rig.now += REPEAT_SECONDS
    assert told in rig.tell(Tick())
    assert told in rig.tell(LinkUp(server(0), life(server(0))))
    rig.commit(start)
    rig.now += REPEAT_SECONDS
    assert told not in rig.tell(Tick())


def test_a_server_without_buckets_keeps_no_rates() -> None:
    rig = ServerRig(servers=2, buckets=1, index=1)
    rig.prepare()
    for step in range(5):
        assert rig.say_rates(step) == []
    assert list(rig.machine._rates) == [INITIAL_STEP]


# -- a bucket's life --


def test_initial_parameters_of_the_chief_become_version_0() -> None:
    rig = ServerRig()
    rig.prepare()
    assert rig.arrive(0, INITIAL_STEP) == [Apply(INITIAL_STEP, 0, (CHIEF,), (1,), 1, (), 1, 0)]
    assert rig.state() == ServedBucketState.APPLYING.value
    effects = rig.applied(INITIAL_STEP)
    assert messages_to(effects, server(0), Applied) == [Applied(INITIAL_STEP)]
    assert messages_to(effects, W0, Open) == messages_to(effects, W1, Open) == [Open(0, ())]
    assert rig.state() == ServedBucketState.COLLECTING.value


def test_initial_parameters_of_anybody_else_are_refused() -> None:
    rig = ServerRig()
    rig.prepare()
    assert rig.arrive(1, INITIAL_STEP) == [GiveBack(1)]
    assert rig.drops() == ["does not contribute to this step"]


def test_a_bucket_is_applied_when_the_last_gradient_is_here_in_the_order_of_worker_index() -> None:
    rig = ready(workers=3)
    assert rig.arrive(2, 0) == []
    assert rig.arrive(0, 0) == []
    (apply,) = only(rig.arrive(1, 0), Apply)
    assert (apply.contributors, apply.arrivals, apply.replicas) == ((W0, W1, worker(2)), (3, 4, 2), 3)
    assert (apply.rates, apply.from_slot, apply.to_slot) == (RATES, 0, 1)


def test_versions_alternate_between_two_slots() -> None:
    rig = ready(workers=1)
    slots = []
    for step in range(3):
        rig.say_rates(step)
        (apply,) = only(rig.arrive(0, step), Apply)
        slots.append((apply.from_slot, apply.to_slot))
        rig.applied(step)
        rig.commit(step)
    assert slots == [(0, 1), (1, 0), (0, 1)]


def test_applying_waits_for_the_chiefs_rates() -> None:
    rig = ServerRig(workers=2)
    rig.initialise()
    rig.arrive(0, 0)
    assert rig.arrive(1, 0) == []
    assert rig.state() == ServedBucketState.COMPLETE.value
    assert rig.hear(W1, Rates(0, RATES)) == []
    assert len(only(rig.say_rates(0), Apply)) == 1


def test_rates_are_taken_once_and_never_for_a_former_step() -> None:
    rig = ready(workers=1)
    other = Rates(0, ())
    assert rig.hear(W0, other) == []
    (apply,) = only(rig.arrive(0, 0), Apply)
    assert apply.rates == RATES
    rig.applied(0)
    assert rig.hear(W0, other) == []
    assert 0 not in rig.machine._rates


def test_applying_waits_for_the_commit_of_the_step_before() -> None:
    """Version 0 must stay until step 0 is complete everywhere; step 1 would overwrite it."""
    rig = ready(workers=1, servers=2, buckets=2)
    rig.arrive(0, 0)
    rig.applied(0)
    rig.say_rates(1)
    assert rig.arrive(0, 1) == []
    assert rig.state() == ServedBucketState.COMPLETE.value
    assert len(only(rig.commit(0), Apply)) == 1


@pytest.mark.parametrize("end", [TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=ok) for ok in (True, False)])
def test_applying_waits_for_readers_of_the_slot_that_it_overwrites(end: TransferEnded) -> None:
    rig = ready(workers=1)
    assert only(rig.pull(0, 0), SendVersion) == [SendVersion(W0, 0, 0, 0, TICKET)]
    do_step(rig, 0)
    rig.say_rates(1)
    assert rig.arrive(0, 1) == []
    assert len(only(rig.tell(end), Apply)) == 1


def test_a_lost_link_is_no_reader_any_more() -> None:
    rig = ready(workers=1)
    rig.pull(0, 0)
    do_step(rig, 0)
    rig.say_rates(1)
    assert rig.arrive(0, 1) == []
    assert len(only(rig.tell(LinkLost(W0, "reset")), Apply)) == 1


def test_the_end_of_a_transfer_that_does_not_count_changes_nothing() -> None:
    rig = ready()
    assert rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=True)) == []


# -- what is dropped, and counted --


@pytest.mark.parametrize(
    ("step", "cause"),
    [(1, "of step 1; this bucket is in step 0"), (INITIAL_STEP, "of step -1; this bucket is in step 0")],
)
def test_a_gradient_of_another_step_is_dropped_counted_and_given_back(step: int, cause: str) -> None:
    rig = ready()
    assert rig.arrive(1, step) == [GiveBack(2)]
    assert rig.machine.dropped == {W1: 1}
    assert rig.drops() == [cause]


def test_a_gradient_of_another_life_is_dropped_counted_and_given_back() -> None:
    rig = ready()
    assert rig.arrive(1, 0, incarnation=life(W1) + 1) == [GiveBack(2)]
    assert rig.machine.dropped == {W1: 1}
    assert rig.drops() == ["of another incarnation of this worker"]


def test_a_duplicate_does_not_count_for_another_worker() -> None:
    rig = ready()
    rig.arrive(0, 0)
    assert rig.arrive(0, 0) == [GiveBack(3)]
    assert rig.drops() == ["a duplicate"]
    assert rig.state() == ServedBucketState.COLLECTING.value


def test_a_duplicate_while_the_step_is_applied_is_dropped() -> None:
    rig = ready(workers=1)
    rig.arrive(0, 0)
    assert rig.arrive(0, 0) == [GiveBack(3)]
    assert rig.drops() == ["a duplicate; the step is being applied"]


def test_a_gradient_of_a_bucket_of_another_server_is_dropped() -> None:
    rig = ready(servers=2, buckets=2)
    assert rig.arrive(0, 0, bucket=1) == [GiveBack(2)]
    assert rig.drops() == ["not a bucket of this server, or not a worker"]


def test_messages_of_strangers_and_other_lives_are_ignored() -> None:
    rig = ServerRig()
    layout = layout_of(rig.plan)
    assert rig.hear(worker(7), layout, incarnation=1) == []
    assert rig.hear(W0, layout, incarnation=life(W0) + 1) == []


@pytest.mark.parametrize("peer", [W0, server(1)])
def test_only_the_coordinator_commits(peer: TaskId) -> None:
    rig = ready(workers=1, servers=2)
    do_step(rig, 0)
    rig.hear(peer, Commit(5))
    rig.hear(server(0), Commit(5), incarnation=life(server(0)) + 1)
    assert rig.machine.committed == 0


def test_a_commit_that_comes_twice_or_late_changes_nothing() -> None:
    rig = ready(workers=1)
    do_step(rig, 0)
    assert rig.commit(0) == rig.commit(INITIAL_STEP) == []
    assert rig.machine.committed == 0


# -- parameters go out --


def test_a_request_is_answered_when_the_version_is_there_and_buckets_of_first_layers_go_first() -> None:
    rig = ServerRig(workers=1, buckets=2)
    rig.prepare()
    assert rig.pull(0, 0) == []
    rig.arrive(0, INITIAL_STEP, 0)
    rig.arrive(0, INITIAL_STEP, 1)
    assert only(rig.applied(INITIAL_STEP, 0), SendVersion) == [SendVersion(W0, 0, 0, 0, TICKET)]
    assert only(rig.applied(INITIAL_STEP, 1), SendVersion) == [SendVersion(W0, 0, 1, 0, TICKET)]
    rig.tell(LinkLost(W0, ""))
    rig.tell(LinkUp(W0, life(W0)))
    assert [effect.bucket for effect in only(rig.pull(0, 0), SendVersion)] == [1, 0]


def test_what_a_worker_has_is_not_sent() -> None:
    rig = ServerRig(workers=1, buckets=2)
    rig.initialise()
    assert [effect.bucket for effect in only(rig.pull(0, 0, have=(1,)), SendVersion)] == [0]


def test_a_stale_request_is_dropped() -> None:
    rig = ready(workers=1)
    rig.pull(0, 1)
    assert rig.pull(0, 0) == []
    assert rig.drops() == ["stale pull"]


def test_a_version_is_sent_again_only_after_growing_patience() -> None:
    rig = ready(workers=1)
    rig.pull(0, 0)
    assert rig.pull(0, 0) == []
    rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=True))
    for patience in (RESEND_SECONDS, 2 * RESEND_SECONDS):
        rig.now += patience - 0.1
        assert only(rig.pull(0, 0), SendVersion) == []
        rig.now += 0.1
        assert len(only(rig.pull(0, 0), SendVersion)) == 1
        rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=True))


def test_a_version_that_did_not_leave_is_sent_with_the_next_request() -> None:
    rig = ready(workers=1)
    rig.pull(0, 0)
    rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=False))
    assert len(only(rig.pull(0, 0), SendVersion)) == 1


def test_the_former_version_can_be_read_until_it_is_overwritten() -> None:
    rig = ready(workers=1)
    do_step(rig, 0)
    assert only(rig.pull(0, 0), SendVersion) == [SendVersion(W0, 0, 0, 0, TICKET)]
    rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=True))
    rig.say_rates(1)
    rig.arrive(0, 1)
    rig.now += RESEND_SECONDS
    assert only(rig.pull(0, 0), SendVersion) == []


# -- steps, commits, the end --


def test_a_step_is_open_again_when_the_last_bucket_is_applied() -> None:
    rig = ready(workers=1, buckets=2)
    rig.arrive(0, 0, 0)
    rig.arrive(0, 0, 1)
    assert rig.applied(0, 0) == []
    effects = rig.applied(0, 1)
    assert messages_to(effects, server(0), Applied) == [Applied(0)]
    assert messages_to(effects, W0, Open) == [Open(1, ())]


def test_that_a_step_is_applied_is_repeated_until_it_is_committed() -> None:
    rig = ready(workers=1)
    rig.arrive(0, 0)
    rig.applied(0)
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), server(0), Applied) == [Applied(0)]
    (wait,) = [wait for wait in rig.machine.waits() if wait.on == server(0)]
    assert (waited_for(wait), wait.since) == ("the commit of step 0", rig.now - REPEAT_SECONDS)
    rig.commit(0)
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), server(0), Applied) == []


def test_whoever_owes_a_gradient_is_asked_again_and_told_what_is_here() -> None:
    rig = ready(workers=2, buckets=2)
    rig.arrive(0, 0, 0)
    rig.arrive(0, 0, 1)
    rig.arrive(1, 0, 1)
    rig.now += REPEAT_SECONDS
    effects = rig.tell(Tick())
    assert messages_to(effects, W0, Open) == []
    assert messages_to(effects, W1, Open) == [Open(0, (1,))]
    (wait,) = rig.machine.waits()
    assert (wait.on, wait.step, wait.state) == (W1, 0, "asked for, 1 bucket outstanding")
    assert ";gradient/bucket_0;" in waited_for(wait)


def test_nobody_waits_for_a_worker_that_has_finished() -> None:
    rig = ready(workers=2)
    rig.hear(W0, Done(0))
    rig.hear(W1, Done(0))
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), W0, Open) == []
    assert rig.machine.waits() == []


def test_workers_that_do_not_take_the_same_number_of_steps_are_named() -> None:
    rig = ready(workers=2)
    do_step(rig, 0)
    rig.hear(W0, Done(1))
    rig.say_rates(1)
    rig.arrive(1, 1)
    rig.now += REPEAT_SECONDS
    (failed,) = messages_to(rig.tell(Tick()), server(0), Failed)
    assert failed.culprit == str(W0)
    assert failed.reason.cause is Cause.OUT_OF_STEP
    assert failed.reason.text == (
        "worker 0 stopped after 1 steps while worker 1 goes on with step 1; give every worker the same number of steps"
    )


def test_workers_that_finish_together_are_not_out_of_step() -> None:
    rig = ready(workers=2)
    rig.arrive(0, 0)
    assert rig.hear(W0, Done(1)) == []
    rig.arrive(1, 0)
    rig.applied(0)
    assert rig.hear(W1, Done(1)) == []
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), server(0), Failed) == []


def test_after_a_new_link_the_worker_is_admitted_again_and_told_what_is_here() -> None:
    rig = ready(workers=2)
    rig.arrive(1, 0)
    rig.tell(LinkLost(W1, "reset"))
    assert [wait.state for wait in rig.machine.waits() if wait.on == W0] == ["asked for, 1 bucket outstanding"]
    rig.tell(LinkUp(W1, life(W1)))
    assert rig.hear(W1, layout_of(rig.plan)) == [GrantRegion(W1), Send(W1, Open(0, (0,)))]


def test_a_link_that_is_up_twice_does_not_take_the_grant_away() -> None:
    """Otherwise a worker that holds its grant would never be told of the next step."""
    rig = ready(workers=1)
    rig.tell(LinkUp(W0, life(W0)))
    rig.arrive(0, 0)
    assert messages_to(rig.applied(0), W0, Open) == [Open(1, ())]


def test_another_life_of_a_worker_must_announce_itself_again() -> None:
    rig = ready(workers=1)
    rig.tell(LinkLost(W0, "gone"))
    rig.tell(LinkUp(W0, 5))
    rig.now += REPEAT_SECONDS
    assert rig.tell(Tick()) == []
    assert rig.machine.waits()[0].state == "not connected"
