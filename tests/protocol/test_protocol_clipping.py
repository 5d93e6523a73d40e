"""Clipping the mean by its norm, transition by transition: worker, servers, coordinator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import Apply, Effect, GiveBack, Measure, NormKnown, Send
from lockstep.protocol.core.events import BucketMeasured, LinkLost, LinkUp, Sealed, Tick
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import (
    Applied,
    Clip,
    Edition,
    Failed,
    PartialNorm,
    Seal,
    TotalNorm,
)
from lockstep.protocol.core.norms import clipping_scale, combined
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.server.step_norm import STEP_NORM_TRANSITIONS, StepNormState, StepNormTrigger
from protocol.protocol_rigs import RATES, CoordinatorRig, ServerRig, WorkerRig, messages_to, only

W0, W1, S0, S1 = worker(0), worker(1), server(0), server(1)
CLIP = Clip(1.0, 2.0)
UNASKED, MEASURING, TOLD, DECIDED = StepNormState
ASK, MEASURED, DECIDE, FORGET = StepNormTrigger


# -- the numbers --


@pytest.mark.parametrize(
    ("norms", "norm_type", "total"),
    [
        ([3.0, 4.0], 2.0, 5.0),
        ([4.0, 3.0], 2.0, 5.0),
        ([3.0, 4.0], 1.0, 7.0),
        ([3.0, 4.0], math.inf, 4.0),
        ([], 2.0, 0.0),
        ([0.0, 0.0], 2.0, 0.0),
        ([1e200, 1e200], 2.0, math.sqrt(2) * 1e200),
        ([1.0, math.inf], 2.0, math.inf),
        ([math.nan, math.inf], math.inf, math.nan),
    ],
)
def test_parts_of_a_norm(norms: list[float], norm_type: float, total: float) -> None:
    assert combined(norms, norm_type) == pytest.approx(total, rel=1e-15, nan_ok=True)


@pytest.mark.parametrize(
    ("norm", "limit", "scale"),
    [(0.5, 1.0, 1.0), (4.0, 1.0, 1 / (4 + 1e-6)), (math.inf, 1.0, 0.0), (math.nan, 1.0, math.nan), (3.0, 0.0, 0.0)],
)
def test_the_scale_is_torchs(norm: float, limit: float, scale: float) -> None:
    assert clipping_scale(norm, limit) == pytest.approx(scale, nan_ok=True)


# -- the table of a server's part --


@pytest.mark.parametrize(
    ("state", "trigger", "after"),
    [
        (UNASKED, ASK, MEASURING),
        (UNASKED, DECIDE, DECIDED),
        (UNASKED, FORGET, UNASKED),
        (MEASURING, MEASURED, TOLD),
        (MEASURING, DECIDE, DECIDED),
        (MEASURING, FORGET, UNASKED),
        (TOLD, DECIDE, DECIDED),
        (TOLD, FORGET, UNASKED),
        (DECIDED, FORGET, UNASKED),
    ],
)
def test_the_table_is_this(state: StepNormState, trigger: StepNormTrigger, after: StepNormState) -> None:
    assert advance(STEP_NORM_TRANSITIONS, state, trigger) is after
    assert len(STEP_NORM_TRANSITIONS) == 9


# -- a server --


def asks(number: int = 1, **fields: object) -> Seal:
    return Seal(0, (), (), clip=(CLIP,), asks=True, number=number, **fields)  # type: ignore[arg-type]


def sealed(number: int = 1) -> Seal:
    return Seal(0, (), (), clip=(CLIP,), number=number)


def ready(buckets: int = 1, servers: int = 1, index: int = 0) -> ServerRig:
    rig = ServerRig(buckets=buckets, servers=servers, index=index, eager=False)
    rig.initialise()
    rig.say_rates(0)
    return rig


def measuring(buckets: int = 1) -> ServerRig:
    rig = ready(buckets)
    for bucket in range(buckets):
        rig.arrive(0, 0, bucket)
        rig.arrive(1, 0, bucket)
    rig.hear(W0, asks())
    rig.hear(W1, asks())
    return rig


def told(rig: ServerRig, norm: float = 4.0) -> list[Effect]:
    return rig.tell(BucketMeasured(0, rig.machine._norm.attempt, norm))


def test_a_bucket_is_measured_once_every_worker_asks_and_its_gradients_are_here() -> None:
    rig = ready(buckets=2)
    rig.arrive(0, 0, 0)
    rig.arrive(1, 0, 0)
    rig.hear(W0, asks())
    assert only(rig.hear(W1, asks()), Measure) == [Measure(0, 0, (3, 4), 2, 2.0, 1)]
    rig.arrive(0, 0, 1)
    assert only(rig.arrive(1, 0, 1), Measure) == [Measure(0, 1, (5, 6), 2, 2.0, 1)]


def test_the_part_is_told_until_the_coordinator_decides_and_nothing_is_applied_before() -> None:
    rig = measuring()
    part = PartialNorm(0, 1, CLIP, 0, 4.0)
    assert messages_to(told(rig), S0, PartialNorm) == [part]
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), S0, PartialNorm) == [part]
    rig.hear(W0, sealed())
    assert only(rig.hear(W1, sealed()), Apply) == []
    decided = rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125))
    assert only(decided, Apply) == [Apply(0, 0, (W0, W1), (2, 3), 2, RATES, 0, 1, scale=0.125)]
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), S0, PartialNorm) == []


def test_a_step_is_applied_only_when_it_is_sealed_not_when_its_norm_is_known() -> None:
    rig = measuring()
    told(rig)
    assert only(rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125)), Apply) == []
    rig.hear(W0, sealed())
    assert [one.scale for one in only(rig.hear(W1, sealed()), Apply)] == [0.125]


def test_a_question_that_overtakes_or_repeats_changes_nothing() -> None:
    rig = measuring()
    rig.hear(W0, sealed())
    for stale in (asks(), sealed()):
        assert rig.hear(W0, stale) == []
    assert rig.machine._workers[W0].seal == sealed()


def test_a_worker_that_begins_the_step_anew_is_measured_anew() -> None:
    rig = measuring()
    told(rig)
    rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125))
    again = Seal(0, (), (Edition(0, 1),), clip=(CLIP,), asks=True, number=2)
    effects: list[Effect] = []
    for index, peer in ((0, W0), (1, W1)):
        assert GiveBack(2 + index) in rig.arrive(index, 0, edition=1)
        effects = rig.hear(peer, again)
    assert only(effects, Measure) == [Measure(0, 0, (4, 5), 2, 2.0, rig.machine._norm.attempt)]
    assert rig.tell(BucketMeasured(0, 1, 4.0)) == []  # of the first attempt
    assert messages_to(told(rig, 6.0), S0, PartialNorm) == [PartialNorm(0, 2, CLIP, 0, 6.0)]
    assert rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125)) == []  # late
    rig.hear(S0, TotalNorm(0, 2, 6.0, 0.5))
    final = Seal(0, (), (Edition(0, 1),), clip=(CLIP,), number=2)
    rig.hear(W0, final)
    assert [one.scale for one in only(rig.hear(W1, final), Apply)] == [0.5]


# -- measured ahead: workers that asked in one step most likely ask in the next --


def clipped_once(buckets: int = 1) -> ServerRig:
    """Step 0 was clipped by its norm and is made; step 1 is open."""
    rig = measuring(buckets)
    for bucket in range(buckets):
        rig.tell(BucketMeasured(bucket, rig.machine._norm.attempt, 4.0))
    rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125))
    rig.hear(W0, sealed())
    rig.hear(W1, sealed())
    for bucket in range(buckets):
        rig.applied(0, bucket)
    rig.commit(0)
    rig.say_rates(1)
    return rig


def test_a_complete_bucket_is_measured_ahead_and_the_question_is_answered_at_once() -> None:
    rig = clipped_once()
    assert only(rig.arrive(0, 1), Measure) == []
    ahead = only(rig.arrive(1, 1), Measure)
    assert ahead == [Measure(1, 0, (4, 5), 2, 2.0, rig.machine._norm.attempt)]
    assert rig.tell(BucketMeasured(0, ahead[0].attempt, 6.0)) == []  # nobody has asked yet
    question = replace(asks(), step=1)
    rig.hear(W0, question)
    answered = rig.hear(W1, question)
    assert only(answered, Measure) == []
    assert messages_to(answered, S0, PartialNorm) == [PartialNorm(1, 1, CLIP, 0, 6.0)]


def test_what_is_still_being_measured_when_the_question_comes_is_awaited() -> None:
    rig = clipped_once()
    rig.arrive(0, 1)
    ahead = only(rig.arrive(1, 1), Measure)
    for peer in (W0, W1):
        assert messages_to(rig.hear(peer, replace(asks(), step=1)), S0, PartialNorm) == []
    told_now = rig.tell(BucketMeasured(0, ahead[0].attempt, 6.0))
    assert messages_to(told_now, S0, PartialNorm) == [PartialNorm(1, 1, CLIP, 0, 6.0)]


def test_a_gradient_that_is_edited_after_it_was_measured_ahead_is_measured_again() -> None:
    rig = clipped_once()
    rig.arrive(0, 1)
    ahead = only(rig.arrive(1, 1), Measure)
    rig.tell(BucketMeasured(0, ahead[0].attempt, 6.0))
    again = only(rig.arrive(1, 1, edition=1), Measure)
    assert [one.arrivals for one in again] == [(4, 6)]
    assert again[0].attempt != ahead[0].attempt
    edited = replace(asks(), step=1, editions=(Edition(0, 1),))
    rig.hear(W0, replace(asks(), step=1))
    assert messages_to(rig.hear(W1, edited), S0, PartialNorm) == []
    assert messages_to(told(rig, 7.0), S0, PartialNorm) == [PartialNorm(1, 1, CLIP, 0, 7.0)]


def test_another_norm_than_the_foreseen_one_is_measured_anew() -> None:
    rig = clipped_once()
    rig.arrive(0, 1)
    ahead = only(rig.arrive(1, 1), Measure)
    rig.tell(BucketMeasured(0, ahead[0].attempt, 6.0))
    other = replace(asks(), step=1, clip=(Clip(1.0, math.inf),))
    rig.hear(W0, other)
    assert [one.norm_type for one in only(rig.hear(W1, other), Measure)] == [math.inf]


def test_nothing_is_measured_ahead_after_a_step_that_was_not_clipped() -> None:
    rig = ready()
    rig.arrive(0, 0)
    assert only(rig.arrive(1, 0), Measure) == []


def test_what_was_taken_back_is_not_taken_for_a_gradient_made_anew() -> None:
    rig = ready()
    rig.arrive(1, 0)
    rig.hear(W0, Seal(0, (0,), (Edition(0, 0),), clip=(CLIP,), asks=True, number=1))
    assert only(rig.arrive(0, 0, edition=0), GiveBack)
    assert not only(rig.arrive(0, 0, edition=1), GiveBack)


def test_a_gradient_that_comes_again_from_another_life_is_measured_again_and_a_decision_stays() -> None:
    rig = measuring()
    told(rig)
    rig.tell(LinkLost(W1, "gone"))
    rig.tell(LinkUp(W1, 77))
    assert rig.machine._norm.state is UNASKED
    rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125))
    assert rig.machine._norm.state is DECIDED
    rig.arrive(1, 0, incarnation=77)
    rig.hear(W0, sealed())
    assert [one.scale for one in only(rig.hear(W1, sealed(), 77), Apply)] == [0.125]


def test_a_step_that_is_clipped_by_value_needs_no_norm() -> None:
    rig = ready()
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    by_value = Seal(0, (), (), clip=(Clip(0.5),))
    rig.hear(W0, by_value)
    (applied,) = only(rig.hear(W1, by_value), Apply)
    assert (applied.scale, applied.limit) == (1.0, 0.5)


def test_a_worker_that_seals_while_another_asks_breaks_the_job() -> None:
    rig = ready()
    rig.hear(W0, asks(occasion="step(), clipped to norm 1"))
    (failed,) = messages_to(rig.hear(W1, Seal(0, (), (), occasion="step()")), S0, Failed)
    assert failed.reason.cause is Cause.OUT_OF_STEP


def test_nobody_waits_for_a_norm_that_nobody_asked_for() -> None:
    rig = ServerRig(eager=False)
    rig.prepare()
    assert not [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]


def test_a_server_without_buckets_waits_for_no_norm() -> None:
    """In a job that started from a checkpoint it stays at a step that workers clip, also for their later lives."""
    rig = ServerRig(servers=2, index=1, eager=False)
    rig.prepare(start=10)
    for task in (W0, W1):
        assert rig.hear(task, replace(asks(), step=10)) == []
        assert rig.machine.waits() == []
    rig.hear(S0, TotalNorm(10, 1, 4.0, 0.25))
    rig.commit(10)
    rig.hear(S0, TotalNorm(11, 1, 4.0, 0.25))
    rig.commit(11)
    rig.tell(LinkUp(W1, 99))
    assert rig.machine.waits() == []


def test_waits_for_a_norm_name_the_worker_then_the_coordinator() -> None:
    rig = ready()
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    rig.hear(W0, asks())
    (late,) = [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]
    assert (late.on, late.step) == (W1, 0)
    rig.hear(W1, asks())
    assert not [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]
    told(rig)
    (late,) = [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]
    assert (late.on, late.deadline) == (S0, rig.now + REPEAT_SECONDS)


def test_once_the_norm_is_known_who_has_not_gone_on_with_the_step_is_waited_for() -> None:
    """It may be in its own code between the clip and the step, or may not have heard of the norm."""
    rig = measuring()
    told(rig)
    rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125))
    rig.hear(W0, sealed())
    (late,) = [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]
    assert (late.on, late.step) == (W1, 0)
    rig.hear(W1, sealed())
    assert not [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]


# -- the coordinator --


def running(servers: int = 2) -> CoordinatorRig:
    rig = CoordinatorRig(servers=servers)
    rig.join_all()
    for index in range(servers):
        rig.hear(server(index), Applied(-1))
    return rig


def part(norm: float, step: int = 0, number: int = 1) -> PartialNorm:
    return PartialNorm(step, number, CLIP, 0, norm)


def test_all_parts_make_one_decision_for_everybody_in_any_order() -> None:
    for order in ((0, 1), (1, 0)):
        rig = running()
        norms = (3.0, 4.0)
        assert rig.hear(server(order[0]), part(norms[order[0]])) == []
        total = TotalNorm(0, 1, 5.0, 1 / (5 + 1e-6))
        assert rig.hear(server(order[1]), part(norms[order[1]])) == [Send(task, total) for task in (S0, S1, W0, W1)]
        assert rig.hear(S1, part(9.0)) == [Send(S1, total)]  # a repetition is answered, and changes nothing
        assert rig.hear(W1, asks()) == [Send(W1, total)]


def test_a_server_without_buckets_has_no_part() -> None:
    rig = CoordinatorRig(servers=2)
    rig.join_all()
    rig.hear(S0, Applied(-1))
    assert rig.hear(S0, part(3.0)) == []
    assert messages_to(rig.hear(S1, Applied(1 << 62)), W0, TotalNorm) or True
    assert rig.machine.norms.missing(rig.machine._measuring_homes(), 0) in ([], [S1])


def test_the_coordinator_waits_for_the_missing_part_by_name() -> None:
    rig = running()
    rig.hear(S0, part(3.0))
    (wait,) = [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]
    assert (wait.waiter, wait.on, wait.step, wait.deadline) == (S0, S1, 0, rig.now + REPEAT_SECONDS)


def test_the_newest_decision_is_kept_and_older_ones_go_with_their_commits() -> None:
    rig = running(servers=1)
    for step in range(3):
        rig.hear(S0, part(float(step), step))
        rig.hear(S0, Applied(step))
    assert rig.hear(W0, Seal(0, (), (), clip=(CLIP,), asks=True, number=1)) == []
    newest = Seal(2, (), (), clip=(CLIP,), asks=True, number=1)
    assert messages_to(rig.hear(W0, newest), W0, TotalNorm) == [TotalNorm(2, 1, 2.0, 1 / (2 + 1e-6))]


def test_parts_of_other_contributors_are_not_mixed() -> None:
    rig = running()
    rig.hear(S0, part(3.0))
    assert rig.hear(S1, PartialNorm(0, 1, CLIP, 1, 4.0)) == []


# -- a worker --


def asking() -> tuple[WorkerRig, list[Effect]]:
    rig = WorkerRig(servers=2, buckets=2, eager=False)
    rig.grant_and_open(-1)
    rig.begin(0)
    rig.grant_and_open(0)
    rig.produce(0, 0)
    return rig, rig.tell(Sealed(0, (1,), (), clip=(CLIP,), asks=True, state=None))


def test_a_question_goes_to_every_server_and_asks_for_no_version() -> None:
    rig, effects = asking()
    assert [effect for effect in effects if not isinstance(effect, Send)] == []
    (to_first,) = messages_to(effects, S0, Seal)
    assert (to_first.asks, to_first.number, to_first.clip) == (True, 1, (CLIP,))
    assert [wait.on for wait in rig.machine.waits() if wait.kind is WaitKind.NORM] == [S0]


def test_it_is_repeated_to_the_coordinator_until_the_answer_is_here_also_in_the_next_step() -> None:
    rig, _ = asking()
    rig.tell(Sealed(0, (1,), RATES, clip=(CLIP,)))
    rig.now += REPEAT_SECONDS
    repeated = messages_to(rig.tell(Tick()), S0, Seal)
    assert {seal.asks for seal in repeated} == {False, True}
    assert rig.hear(S0, TotalNorm(0, 2, 1.0, 1.0)) == []  # of another question
    assert rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125)) == [NormKnown(0, 1, 8.0)]
    assert rig.hear(S0, TotalNorm(0, 1, 8.0, 0.125)) == []
    assert not [wait for wait in rig.machine.waits() if wait.kind is WaitKind.NORM]


def test_a_question_that_is_given_up_counts_as_another_step() -> None:
    rig, _ = asking()
    (final,) = messages_to(rig.tell(Sealed(0, (1,), RATES)), S0, Seal)
    assert (final.number, final.clip, final.asks) == (2, (), False)


def test_the_seal_that_follows_has_the_number_of_the_question() -> None:
    rig, _ = asking()
    (final,) = messages_to(rig.tell(Sealed(0, (1,), RATES, clip=(CLIP,))), S0, Seal)
    assert (final.number, final.order) == (1, (1, True))
