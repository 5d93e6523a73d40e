"""From what is seen of all ranks to a verdict, on paper: each fault in the shape that real ones were seen in."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

import pytest

from flight.jobs import STOP, PaperJob, Planned, steps
from lockstep.diagnose.verdict import Verdict
from lockstep.flight.analysis import account_of
from lockstep.flight.recording import CallState, Recording, StackLine
from lockstep.protocol.core.causes import Cause
from lockstep.runtime.watch.kernel_tcp import Counted
from lockstep.watch import injected
from lockstep.watch.judging import JobSight, judge
from lockstep.watch.ranks import NamedBucket, RankFacts, RankStatus
from lockstep.watch.sights import Helper, RankSight, Vitality, Work

NOW = 1e6
LINE = StackLine("evaluate", "/home/me/train.py", 31)
MUTE = RankStatus(step=4, beat=NOW - 9)
LOADER = StackLine("_try_get_data", "/venv/site-packages/torch/utils/data/dataloader.py", 1300)


def recordings(*plans: list[Planned]) -> dict[int, Recording]:
    return PaperJob({"0": tuple(range(len(plans)))}, dict(enumerate(plans)), "gloo").run().recordings()


def stuck_at_5() -> dict[int, Recording]:
    """Ranks 0 and 2 wait in the fifth call, rank 1 is in its own code."""
    return recordings([*steps(5)], [*steps(4), STOP], [*steps(5)])


def sight(rank: int, recording: Recording | None, **more: object) -> RankSight:
    usual = RankSight(
        rank=rank,
        host="node",
        pid=100 + rank,
        life=Vitality.RUNS,
        status=RankStatus(step=4, beat=NOW),
        entered=True,
        recording=recording,
    )
    return replace(usual, **more)  # type: ignore[arg-type]  # fields of a sight


def verdict(
    found: Mapping[int, Recording], *sights: RankSight, waited: float = 3.0, began: bool = True
) -> Verdict | None:
    seen = {rank: sight(rank, found.get(rank)) for rank in range(3)}
    seen |= {one.rank: one for one in sights}
    kept = {rank: one.recording for rank, one in seen.items() if one.recording is not None}
    diagnosis = judge(JobSight(account=account_of(kept), sights=seen, now=NOW, waited=waited, began=began))
    return None if diagnosis is None else diagnosis.verdict


def cause(found: Verdict | None) -> tuple[Cause, str] | None:
    return None if found is None else (found.cause, found.culprit)


def test_a_job_that_moves_has_no_verdict() -> None:
    healthy = recordings([*steps(5)], [*steps(5)], [*steps(5)])
    seen = [sight(rank, healthy[rank], work=Work.COLLECTIVE) for rank in range(3)]
    assert verdict(healthy, *seen) is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"life": Vitality.GONE, "exit_code": -signal.SIGKILL, "ended": NOW - 1}, Cause.DEAD),
        (
            {"life": Vitality.GONE, "exit_code": 1, "ended": NOW, "facts": RankFacts(error="ValueError: x")},
            Cause.FAILED,
        ),
        ({"life": Vitality.STOPPED, "state": "stopped"}, Cause.FROZEN),
        ({"busy": 0.0, "stack": (LINE,), "work": Work.PROGRAM}, Cause.USER_CODE),
        ({"busy": 0.9, "stack": (LINE,), "work": Work.PROGRAM}, Cause.LOOPING),
        ({"status": MUTE, "stack": (LINE,), "work": Work.PROGRAM}, Cause.USER_CODE),
        ({"status": MUTE, "stack": (LINE,), "work": Work.PROGRAM, "on_device": True}, Cause.DEVICE_CALL),
        ({"work": Work.INPUT, "stack": (LOADER,), "helpers": (Helper(7, True, False, 0.0),)}, Cause.INPUT_STARVED),
        ({"work": Work.INPUT, "stack": (LOADER,), "helpers": (Helper(7, False, False, 0.9),)}, Cause.USER_CODE),
    ],
)
def test_why_a_rank_has_not_entered_is_its_own_evidence(more: dict[str, object], expected: Cause) -> None:
    found = stuck_at_5()
    one = verdict(found, sight(1, found[1], **more))
    assert one is not None
    assert (one.cause, one.culprit, one.pid, one.host, one.step) == (expected, "rank 1", 101, "node", 4)


def test_a_loader_that_is_slow_is_not_one_that_is_idle() -> None:
    found = stuck_at_5()
    waits = sight(1, found[1], work=Work.INPUT, stack=(LOADER,), helpers=(Helper(7, False, False, 0.0),))
    seen = {rank: sight(rank, found[rank]) for rank in (0, 2)} | {1: waits}
    causes = []
    starved: list[dict[int, float]] = [{}, {1: 3.0}, {1: 6.0}]
    for starving in starved:
        diagnosis = judge(JobSight(account=account_of(found), sights=seen, now=NOW, waited=60.0, starving=starving))
        assert diagnosis is not None
        causes.append(cause(diagnosis.verdict))
    assert causes == [(one, "rank 1") for one in (Cause.USER_CODE, Cause.USER_CODE, Cause.INPUT_STARVED)]


def test_a_stack_that_could_not_be_taken_is_tried_again_and_then_done_without() -> None:
    found = stuck_at_5()
    assert verdict(found) is None
    assert cause(verdict(found, waited=30.0)) == (Cause.USER_CODE, "rank 1")
    no_dump = sight(1, None, stack=(LINE,), work=Work.PROGRAM)
    assert verdict(found, no_dump) is None, "it may well be in another collective"
    assert cause(verdict(found, no_dump, waited=30.0)) == (Cause.USER_CODE, "rank 1")


def test_a_rank_that_left_cleanly_is_to_blame_and_not_those_who_fail_because_of_it() -> None:
    found = stuck_at_5()
    left = sight(1, found[1], life=Vitality.GONE, exit_code=0, ended=NOW)
    failed = sight(0, found[0], life=Vitality.GONE, exit_code=1, ended=NOW - 1, facts=RankFacts(error="closed by peer"))
    assert cause(verdict(found, left, failed)) == (Cause.OUT_OF_STEP, "rank 1")


def test_the_same_when_gloo_has_already_ended_the_call_of_the_others() -> None:
    """Their call is over, since it failed, and nothing is stuck any more."""
    found = recordings([*steps(5)], [*steps(5)], [*steps(5)])
    groups = RankFacts(groups={"0": (0, 1, 2)})
    behind = replace(found[1], calls=found[1].calls[:-1])
    left = sight(1, behind, life=Vitality.GONE, exit_code=0, ended=NOW, facts=groups)
    failed = sight(0, found[0], life=Vitality.GONE, exit_code=1, ended=NOW, facts=replace(groups, error="closed"))
    assert cause(verdict(found, left, failed)) == (Cause.OUT_OF_STEP, "rank 1")
    even = sight(1, found[1], life=Vitality.GONE, exit_code=0, ended=NOW, facts=groups)
    assert cause(verdict(found, even, failed)) == (Cause.FAILED, "rank 0")


def test_a_rank_that_leaves_when_all_is_done_is_no_fault() -> None:
    healthy = recordings([*steps(5)], [*steps(5)], [*steps(5)])
    left = sight(1, healthy[1], life=Vitality.GONE, exit_code=0, ended=NOW)
    saves = [sight(rank, healthy[rank], work=Work.COLLECTIVE) for rank in (0, 2)]
    assert verdict(healthy, left, *saves) is None


def test_of_several_that_are_gone_the_killed_one_is_to_blame() -> None:
    found = stuck_at_5()
    gone: dict[str, object] = {"life": Vitality.GONE, "ended": NOW}
    killed = sight(1, None, exit_code=-9, **gone)
    failed = sight(0, found[0], exit_code=1, facts=RankFacts(error="closed by peer", raised=NOW - 1), **gone)
    ended = sight(2, found[2], exit_code=-15, **gone)
    assert cause(verdict(found, killed, failed, ended)) == (Cause.DEAD, "rank 1")


def test_how_a_rank_left_that_its_launcher_has_reaped_already() -> None:
    found = stuck_at_5()
    gone: dict[str, object] = {"life": Vitality.GONE, "ended": NOW}
    left = sight(1, found[1], status=RankStatus(step=4, leaving=injected.EXITING), **gone)
    assert cause(verdict(found, left)) == (Cause.OUT_OF_STEP, "rank 1")
    assert cause(verdict(found, sight(1, found[1], **gone))) == (Cause.DEAD, "rank 1")


def test_calls_that_differ_and_rings_come_from_the_recordings() -> None:
    differ = recordings([*steps(4), Planned("0", elements=5)], [*steps(5)], [*steps(5)])
    assert cause(verdict(differ)) == (Cause.OTHER_CALL, "rank 0")
    groups = {"0": (0, 1, 2), "a": (0, 1, 2), "b": (0, 1, 2)}
    first, second = [Planned("a"), Planned("b")], [Planned("b"), Planned("a")]
    ring = PaperJob(groups, {0: first, 1: second, 2: first}).run().recordings()
    assert cause(verdict(ring)) == (Cause.DEADLOCK, "ranks 0 and 1")


def test_a_ring_of_waits_is_found_though_the_recorders_have_wrapped() -> None:
    groups = {"0": (0, 1, 2), "a": (0, 1, 2), "b": (0, 1, 2)}
    first, second = [*steps(9), Planned("a"), Planned("b")], [*steps(9), Planned("b"), Planned("a")]
    ring = PaperJob(groups, {0: first, 1: second, 2: first}).run().recordings(kept=4)
    assert cause(verdict(ring)) == (Cause.DEADLOCK, "ranks 0 and 1")


def test_gloo_has_aborted_the_rank_that_received_more_than_it_expected() -> None:
    """Of the two that are left, the one with the larger tensor is the odd one."""
    found = recordings([*steps(5)], [*steps(4), Planned("0", elements=4680)], [*steps(5)])
    aborted = sight(0, None, life=Vitality.GONE, exit_code=-signal.SIGABRT, ended=NOW)
    assert cause(verdict({1: found[1], 2: found[2]}, aborted)) == (Cause.OTHER_CALL, "rank 1")


def test_ranks_that_never_came() -> None:
    waiting = [sight(rank, None, work=Work.JOINING, stack=(LINE,)) for rank in (0, 2)]
    found = verdict({}, *waiting, RankSight(rank=1, life=Vitality.UNSEEN))
    assert cause(found) == (Cause.NEVER_STARTED, "rank 1")
    late = sight(1, None, work=Work.PROGRAM, stack=(LINE,))
    assert verdict({}, *waiting, late, began=False) is None, "it may still import its libraries"
    assert cause(verdict({}, *waiting, late, waited=20.0, began=False)) == (Cause.USER_CODE, "rank 1")


def in_it(
    still: float,
    counted: Counted,
    backend: str = "gloo",
    waited: float = 6.0,
    state: CallState = CallState.SCHEDULED,
) -> Verdict | None:
    """All are in the fifth call, and none is done."""
    plans = {rank: [*steps(5)] for rank in range(3)} | {3: [*steps(4)]}
    found = PaperJob({"0": (0, 1, 2, 3)}, plans, backend).run().recordings()
    seen = {
        rank: sight(
            rank,
            replace(
                found[rank],
                members={"0": (0, 1, 2)},
                calls=(*found[rank].calls[:-1], replace(found[rank].calls[-1], state=state)),
            ),
            links={"10.0.0.2": counted},
        )
        for rank in range(3)
    }
    account = account_of({rank: one.recording for rank, one in seen.items() if one.recording is not None})
    diagnosis = judge(JobSight(account=account, sights=seen, now=NOW, waited=waited, still=still))
    return None if diagnosis is None else diagnosis.verdict


def test_all_are_in_it_and_the_kernel_repeats_itself() -> None:
    found = in_it(0.5, Counted(retransmits=5, stuck=4096, waiting=4096))
    assert found is not None
    assert (found.cause, found.link) == (Cause.LINK_DOWN, "10.0.0.2")


def test_all_are_in_it_and_nothing_moves() -> None:
    found = in_it(6.0, Counted(acknowledged=10))
    assert found is not None
    assert found.cause is Cause.COMMUNICATION
    assert in_it(0.5, Counted(acknowledged=10)) is None, "bytes move: it is only large"


def test_calls_of_nccl_may_wait_for_a_gpu_that_is_busy() -> None:
    """Their bytes do not go through TCP, and whether they have begun is rarely known."""
    quiet = Counted(acknowledged=10)
    assert in_it(9.0, quiet, "nccl", waited=9.0) is None
    noticed, late = in_it(20.0, quiet, "nccl", waited=20.0), in_it(61.0, quiet, "nccl", waited=61.0)
    assert noticed is not None
    assert late is not None
    assert (noticed.cause, late.cause) == (Cause.UNKNOWN, Cause.COMMUNICATION)
    assert "all_reduce 5" in noticed.stuck
    begun = in_it(20.0, quiet, "nccl", waited=20.0, state=CallState.STARTED)
    assert begun is not None
    assert begun.cause is Cause.COMMUNICATION


def test_the_parameters_of_the_missing_bucket_are_named() -> None:
    found = stuck_at_5()
    elements = found[0].calls[-1].inputs.elements
    facts = RankFacts(buckets=(NamedBucket(elements, ("fc.weight", "fc.bias")), NamedBucket(7, ("other",))))
    one = verdict(found, sight(0, found[0], facts=facts), sight(1, found[1], stack=(LINE,), work=Work.PROGRAM))
    assert one is not None
    assert one.names == ("fc.weight", "fc.bias")
