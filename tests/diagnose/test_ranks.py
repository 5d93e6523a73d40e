"""Verdicts about ranks: the simulator's snapshots of a cluster without servers, read and judged as real ones are."""

from __future__ import annotations

import pytest

from lockstep.diagnose.analyse import analyse, judge
from lockstep.diagnose.evidence import Ended, Evidence, Seen, find_chains
from lockstep.diagnose.text import render
from lockstep.diagnose.verdict import Verdict
from lockstep.diagnose.views import TaskView, WaitView
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.faults import DropMessage, DropTensor, FaultPlace, SlowStore, Stick
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.plan import BUFFERS
from lockstep.protocol.core.waits import WaitKind
from lockstep.sim.evidence import evidence_of
from lockstep.sim.faults import AnyFault, Partition
from lockstep.sim.planting import plant
from lockstep.sim.scenario import NetworkProfile, Scenario, TrainingProfile
from lockstep.sim.world import World
from protocol.scenarios import TWO_GROUPS

W0, W1, W2 = (str(worker(index)) for index in range(3))
STEP = 4


def stuck_with(*faults: AnyFault, seconds: float = 30.0) -> Evidence:
    """What every task of three ranks reports some time after these faults have struck."""
    scenario = Scenario(
        seed=1,
        servers=0,
        workers=3,
        parameters=TWO_GROUPS,
        network=NetworkProfile(quiet_after=0.0),
        training=TrainingProfile(steps=1000),
    )
    world = World(scenario)
    plant(world, faults)
    world.begin()
    while world.agenda.now < seconds:
        world.agenda.run_next()
    return evidence_of(world)


def verdict_of(evidence: Evidence) -> Verdict:
    verdict = analyse(evidence).verdict
    assert verdict is not None
    assert "server" not in verdict.what + verdict.stuck + verdict.remedy + " ".join(verdict.evidence)
    return verdict


def test_a_lost_gradient_is_named_by_bucket_step_and_both_ranks() -> None:
    verdict = verdict_of(stuck_with(DropTensor(W1, W0, STEP, 0, 0)))
    assert (verdict.cause, verdict.culprit, verdict.peer, verdict.step) == (Cause.ANSWER_LOST, W1, W0, STEP)
    assert "gradient/bucket_0" in verdict.key
    assert verdict.stuck == f"step {STEP} is stuck: worker 0 is waiting for worker 1's gradient of bucket 0"
    assert verdict.what == f"worker 1 sent gradient bucket 0 of step {STEP}, but it never arrived"


def test_a_lost_mean_is_called_a_mean() -> None:
    verdict = verdict_of(stuck_with(DropTensor(W0, W1, STEP + 1, 0, 0)))
    assert (verdict.cause, verdict.culprit, verdict.peer, verdict.step) == (Cause.ANSWER_LOST, W0, W1, STEP)
    assert verdict.stuck == f"step {STEP} is stuck: worker 1 is waiting for the mean of bucket 0 from worker 0"
    assert verdict.what == f"worker 0 sent mean bucket 0 of step {STEP}, but it never arrived"


@pytest.mark.parametrize(
    ("fault", "asked", "asker"),
    [(DropMessage(W1, W0, "Pull", STEP, 0), "means", W1), (DropMessage(W0, W1, "Open", STEP, 0), "gradients", W0)],
)
def test_a_lost_request_is_seen_from_both_sides(fault: AnyFault, asked: str, asker: str) -> None:
    verdict = verdict_of(stuck_with(fault))
    assert verdict.cause is Cause.REQUEST_LOST
    assert {verdict.culprit, verdict.peer} == {W0, W1}
    assert verdict.peer == asker
    assert f"for the {asked} of step {STEP}, but the request never arrived" in verdict.what


def test_a_commit_that_one_cut_link_holds_up_is_not_blamed_on_another_rank() -> None:
    """All have applied the step, but the coordinator cannot hear that of worker 1; worker 2 waits for it too."""
    lost = DropMessage(W1, W0, "Applied", STEP, 0)
    evidence = stuck_with(lost, Partition(W1, W0, 8.0, -1.0, one_way=True))
    verdicts = [judge(evidence, ending) for ending in find_chains(evidence).endings.values()]
    proven = [verdict for verdict in verdicts if verdict.proven]
    assert proven
    assert {(verdict.cause, frozenset({verdict.culprit, verdict.peer})) for verdict in proven} == {
        (Cause.ONE_WAY_LINK, frozenset({W0, W1}))
    }


@pytest.mark.parametrize("culprit", [W0, W1, W2])
def test_a_rank_stuck_in_its_program_is_named_although_all_wait_for_all(culprit: str) -> None:
    """Every rank owes every other gradients and means; only one of them does not wait."""
    evidence = stuck_with(Stick(culprit, FaultPlace.USER_CODE, STEP, 1000.0))
    verdict = verdict_of(evidence)
    assert (verdict.cause, verdict.culprit, verdict.step) == (Cause.USER_CODE, culprit, STEP)
    waits = {(name, wait.on) for name, seen in evidence.tasks.items() if seen.view for wait in seen.view.waits}
    assert not any(waiter == on for waiter, on in waits), "nobody waits for itself"


def test_a_share_that_is_busy_is_named_with_a_remedy_for_a_worker() -> None:
    evidence = stuck_with(SlowStore(W1, STEP, 1000.0, busy=True))
    verdict = verdict_of(evidence)
    assert (verdict.cause, verdict.culprit) == (Cause.OVERLOADED_SERVER, W1)
    assert "--ps" not in verdict.remedy
    told = render("report", analyse(evidence))
    assert "overloaded rank" in told
    assert "server" not in told


def test_a_snapshot_has_both_books_of_a_rank() -> None:
    view = stuck_with(DropTensor(W1, W0, STEP, 0, 0)).view(W0)
    assert view is not None
    assert set(view.served) < set(view.buckets), "its share is a part of what it holds"
    assert set(view.workers) == set(view.servers) == {W0, W1, W2}
    assert view.served_step == STEP
    assert set(view.served[0].arrived) == {W0, W2}
    assert {wait.kind for wait in view.waits} >= {WaitKind.GRADIENT}


def test_a_bucket_without_a_parameter_is_named_only_if_nothing_else_is_missing() -> None:
    def means_missing(*buckets: tuple[int, str]) -> Verdict:
        waits = tuple(WaitView(W1, WaitKind.PARAMETER, "", "", STEP, 30.0, "", b, (name,)) for b, name in buckets)
        tasks = {W0: Seen(task=W0, view=TaskView(task=W0, waits=waits)), W1: Seen(task=W1)}
        return verdict_of(Evidence(tasks=tasks, asker=W0))

    assert means_missing((1, BUFFERS), (0, "conv1.weight")).names == ("conv1.weight",)
    only = means_missing((1, BUFFERS))
    assert only.stuck.endswith("the mean of bucket 1 (the chief's buffers) from worker 1")


def test_what_ended_a_job_is_not_explained_by_a_bucket_without_a_parameter() -> None:
    wait = WaitView(W1, WaitKind.PARAMETER, "key", "", STEP, 2.0, "", 1, (BUFFERS,))
    tasks = {W0: Seen(task=W0, view=TaskView(task=W0, waits=(wait,))), W1: Seen(task=W1)}
    end = Ended(W1, STEP, Reason(Cause.OUT_OF_STEP, "stopped early"))
    verdict = verdict_of(Evidence(tasks=tasks, asker=W0, end=end))
    assert (verdict.cause, verdict.culprit, verdict.peer) == (Cause.OUT_OF_STEP, W1, W0)
    assert (verdict.key, verdict.names) == ("", ())
