"""The server's machine without synchronisation."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.effects import Apply, GiveBack, SendVersion
from lockstep.protocol.core.events import LinkLost, LinkUp, TensorKind, Tick, TransferEnded
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import Done, Edition, GroupRates, Open, Rates, Seal
from lockstep.protocol.core.timing import REPEAT_SECONDS, RESEND_SECONDS
from lockstep.protocol.phrases import waited_for
from protocol.protocol_rigs import RATES, TICKET, ServerRig, layout_of, life, messages_to, only

W0, W1 = worker(0), worker(1)


def ready(*, workers: int = 2, buckets: int = 1) -> ServerRig:
    rig = ServerRig(workers=workers, buckets=buckets, synchronous=False)
    rig.initialise()
    rig.say_rates(0)
    return rig


def test_each_gradient_is_applied_by_itself_and_its_sender_goes_on() -> None:
    rig = ready()
    rig.pull(1, 1)
    assert rig.arrive(1, 0) == [Apply(0, 0, (W1,), (2,), 1, RATES, 0, 1)]
    effects = rig.applied(0)
    assert only(effects, SendVersion) == [SendVersion(W1, 1, 0, 1, TICKET)]
    assert messages_to(effects, W1, Open) == [Open(1, ())]
    assert messages_to(effects, W0, Open) == []


def test_a_bucket_is_updated_for_one_worker_at_a_time_in_the_order_of_arrival() -> None:
    rig = ready()
    rig.arrive(1, 0)
    assert rig.arrive(0, 0) == []
    assert only(rig.applied(0), Apply) == [Apply(0, 0, (W0,), (3,), 1, RATES, 1, 0)]


def test_an_update_does_not_overwrite_what_is_being_sent() -> None:
    rig = ready()
    rig.pull(0, 0)
    rig.arrive(1, 0)
    rig.applied(0)
    (apply,) = only(rig.arrive(0, 0), Apply)
    assert (apply.from_slot, apply.to_slot) == (1, 2)


def test_workers_that_hang_while_they_receive_do_not_hold_the_one_that_trains() -> None:
    """Over shared memory the receiver copies: a stopped one reads its slot until it is continued."""
    rig = ready(workers=3)
    for one in (1, 2):
        rig.pull(one, 1)
        rig.arrive(one, 0)
        assert len(only(rig.applied(0), SendVersion)) == 1
    for step in range(8):
        rig.pull(0, step + 1)
        assert len(only(rig.arrive(0, step), Apply)) == 1, f"step {step} waits for a worker that hangs"
        assert len(only(rig.applied(step), SendVersion)) == 1
        rig.tell(TransferEnded(W0, step + 1, 0, TensorKind.VERSION, ok=True))
        rig.machine.check()


def test_duplicates_and_other_steps_are_dropped_and_given_back() -> None:
    rig = ready()
    rig.arrive(1, 0)
    assert rig.arrive(1, 0) == [GiveBack(3)]
    assert rig.arrive(0, 1) == [GiveBack(4)]
    assert rig.arrive(0, 0, incarnation=5) == [GiveBack(5)]
    assert rig.arrive(0, 0, bucket=7) == [GiveBack(6)]
    assert rig.drops() == [
        "a duplicate",
        "of step 1; step 0 is expected",
        "of another incarnation of this worker",
        "not a bucket of this server, or not a worker",
    ]
    assert rig.machine.dropped == {W1: 1, W0: 3}


def test_the_latest_rates_of_the_chief_hold_for_everybody_in_whichever_order_they_come() -> None:
    rig = ServerRig(synchronous=False)
    rig.initialise()
    assert rig.arrive(1, 0) == []
    assert rig.hear(W1, Rates(9, ())) == []
    newer = (GroupRates(("lr",), (0.01,)),)
    assert [apply.rates for apply in only(rig.hear(W0, Rates(4, newer)), Apply)] == [newer]
    rig.applied(0)
    rig.say_rates(3)
    assert [apply.rates for apply in only(rig.arrive(0, 0), Apply)] == [newer]


def test_a_version_is_never_sent_twice_over_one_link() -> None:
    """The value may have changed since: landing late, it would overwrite what the worker computes with."""
    rig = ready()
    assert len(only(rig.pull(0, 0), SendVersion)) == 1
    rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=True))
    rig.now += 100 * RESEND_SECONDS
    assert only(rig.pull(0, 0), SendVersion) == []
    rig.tell(LinkLost(W0, "reset"))
    rig.tell(LinkUp(W0, life(W0)))
    assert len(only(rig.pull(0, 0), SendVersion)) == 1


def test_a_version_that_did_not_leave_is_sent_with_the_next_request() -> None:
    rig = ready()
    rig.pull(0, 0)
    rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=False))
    assert len(only(rig.pull(0, 0), SendVersion)) == 1


def test_a_bucket_without_a_gradient_is_delivered_as_it_is_and_the_next_step_is_open() -> None:
    rig = ready(workers=1)
    rig.pull(0, 1)
    effects = rig.hear(W0, Seal(0, (0,), ()))
    assert only(effects, SendVersion) == [SendVersion(W0, 1, 0, 0, TICKET)]
    assert messages_to(effects, W0, Open) == [Open(1, ())]
    assert rig.hear(W0, Seal(0, (0,), ())) == []


def test_the_next_step_is_open_although_the_version_was_not_asked_for_yet() -> None:
    rig = ready(workers=1)
    assert messages_to(rig.hear(W0, Seal(0, (0,), ())), W0, Open) == [Open(1, ())]


def test_a_wait_names_the_step_of_the_worker_and_only_what_it_owes() -> None:
    rig = ready(buckets=2)
    rig.arrive(0, 0, 0)
    rig.applied(0, 0)
    (first, second) = rig.machine.waits()
    assert (first.on, first.step, first.state) == (W0, 0, "asked for, 1 bucket outstanding")
    assert ";gradient/bucket_1;" in waited_for(first)
    assert (second.on, second.state) == (W1, "asked for, 2 buckets outstanding")
    rig.arrive(0, 0, 1)
    assert [wait.on for wait in rig.machine.waits()] == [W1]
    rig.applied(0, 1)
    assert next(wait.step for wait in rig.machine.waits() if wait.on == W0) == 1


def test_whoever_owes_a_gradient_is_asked_again_and_a_finished_worker_is_not() -> None:
    rig = ready(buckets=2)
    rig.arrive(0, 0, 0)
    rig.hear(W1, Done(0))
    rig.now += REPEAT_SECONDS
    effects = rig.tell(Tick())
    assert messages_to(effects, W0, Open) == [Open(0, (0,))]
    assert messages_to(effects, W1, Open) == []


def test_workers_may_do_different_numbers_of_steps() -> None:
    rig = ready()
    rig.hear(W0, Done(0))
    rig.arrive(1, 0)
    rig.applied(0)
    assert [apply.step for apply in only(rig.arrive(1, 1), Apply)] == [1]


def test_after_a_new_link_the_worker_is_told_its_own_step_and_what_is_here() -> None:
    rig = ready(buckets=2)
    rig.arrive(1, 0, 0)
    rig.applied(0, 0)
    rig.arrive(1, 0, 1)
    rig.tell(LinkLost(W1, "reset"))
    rig.tell(LinkUp(W1, life(W1)))
    assert messages_to(rig.hear(W1, layout_of(rig.plan)), W1, Open) == [Open(0, (0, 1))]
    rig.applied(0, 1)
    assert messages_to(rig.hear(W1, layout_of(rig.plan)), W1, Open) == [Open(1, ())]


# -- with seals --


def sealing() -> ServerRig:
    rig = ServerRig(workers=2, synchronous=False, eager=False)
    rig.initialise()
    rig.say_rates(0)
    return rig


def test_a_gradient_is_applied_once_its_own_worker_has_sealed_it() -> None:
    rig = sealing()
    assert rig.arrive(0, 0) == rig.arrive(1, 0) == []
    (apply,) = only(rig.hear(W1, Seal(0, (), ())), Apply)
    assert (apply.contributors, apply.arrivals) == ((W1,), (3,))


def test_nobody_waits_for_a_worker_that_has_not_sealed() -> None:
    """Worker 0 delivers first and seals late; worker 1 goes on all the same."""
    rig = sealing()
    rig.arrive(0, 0)
    for step in range(3):
        rig.hear(W1, Seal(step, (), ()))
        assert [a.contributors for a in only(rig.arrive(1, step), Apply)] == [(W1,)]
        rig.applied(step)


def test_the_sealed_edition_is_applied_and_others_go_back() -> None:
    rig = sealing()
    rig.arrive(0, 0, edition=0)
    assert rig.arrive(0, 0, edition=1) == [GiveBack(2)]
    assert rig.arrive(0, 0, edition=1) == [GiveBack(4)]
    assert rig.hear(W0, Seal(0, (), (Edition(0, 2),))) == [GiveBack(3)]
    assert rig.arrive(0, 0, edition=1) == [GiveBack(5)]
    assert [a.arrivals for a in only(rig.arrive(0, 0, edition=2), Apply)] == [(6,)]
    assert rig.hear(W0, Seal(0, (), (Edition(0, 2),))) == []


@pytest.mark.parametrize("seal", [Seal(0, (0,), ()), Seal(0, (), (), void=True)])
def test_a_gradient_that_was_taken_back_goes_back_and_its_worker_moves_on(seal: Seal) -> None:
    rig = sealing()
    rig.arrive(0, 0)
    effects = rig.hear(W0, seal)
    assert only(effects, GiveBack) == [GiveBack(2)]
    assert messages_to(effects, W0, Open) == [Open(1, ())]
    assert rig.arrive(0, 0) == [GiveBack(3)]
    assert only(effects, Apply) == []


def test_a_chief_that_leaves_without_a_step_leaves_the_rates_that_it_announced() -> None:
    rig = ServerRig(workers=2, synchronous=False)
    rig.initialise()
    assert rig.arrive(1, 0) == []
    assert only(rig.hear(W0, Done(0)), Apply) == [Apply(0, 0, (W1,), (2,), 1, (), 0, 1)]
