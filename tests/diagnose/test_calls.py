"""What is found about workers that wait for others in a call."""

from __future__ import annotations

import pytest

from diagnose.faulty import CALL, call, missed_call, stuck_before_a_call
from helpers.snapshots import PS0, W0, W1, standing
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.verdict import Verdict
from lockstep.protocol.core.causes import Cause


def verdict_of(cluster: object) -> Verdict:
    verdict = analyse(cluster.evidence()).verdict  # type: ignore[attr-defined]
    assert verdict is not None
    return verdict


def test_who_has_not_come_is_named_with_what_it_does_instead() -> None:
    verdict = verdict_of(stuck_before_a_call())
    assert verdict.culprit == str(W1)
    assert verdict.stuck == f"step 10 is stuck: worker 0 is waiting for worker 1 in {CALL}"
    assert "worker 1 is stuck in user code" in verdict.what


@pytest.mark.parametrize(("doing", "cpu", "cause"), [("busy", 0.0, Cause.BUSY), ("computing", 0.9, Cause.STRAGGLER)])
def test_a_worker_that_is_only_late_is_not_called_stuck(doing: str, cpu: float, cause: Cause) -> None:
    assert verdict_of(standing(call(), doing, cpu=cpu)).cause is cause


def test_two_that_wait_for_each_other_in_different_places_are_told_so() -> None:
    verdict = verdict_of(missed_call())
    assert verdict.what == f"worker 0 waits in {CALL}, while worker 1 waits for version 11, which needs worker 0"


def test_a_worker_that_has_come_meanwhile_is_not_waited_for() -> None:
    cluster = call()
    cluster.task(PS0)["waits"] = []
    cluster.task(W1)["main"] = {"doing": "in a call", "detail": CALL, "seconds": 0.1, "cpu": 0.0}
    cluster.task(W1)["machines"]["call"] = {"place": [1, 10, 0], "open": True}
    assert verdict_of(cluster).culprit != str(W1)
    cluster.task(W1)["machines"]["call"] = {"place": [1, 10, 1], "open": False}
    assert verdict_of(cluster).culprit != str(W1)


def test_an_answer_that_does_not_reach_a_worker_is_the_links_fault() -> None:
    """All have come, as worker 0 cannot know: it no longer hears the coordinator."""
    cluster = call()
    cluster.task(W1)["machines"]["call"] = {"place": [1, 10, 0], "open": False}
    cluster.both_unheard(W0, PS0, 8.0)
    for one, other in ((W0, PS0), (PS0, W0)):
        cluster.link(one, other)["kernel"].update(segments_in=0, waiting=900)
    verdict = verdict_of(cluster)
    assert (verdict.cause, verdict.pair()) == (Cause.LINK_DOWN, frozenset({str(W0), str(PS0)}))


def test_a_server_that_lacks_the_gradient_of_a_worker_in_a_call_does_not_blame_it() -> None:
    verdict = verdict_of(stuck_before_a_call())
    assert verdict.pair() == {str(W0), str(W1)}


def test_what_a_rank_makes_for_others_does_not_keep_it_from_a_call() -> None:
    """Its share waits for worker 0's gradient, but its program is elsewhere."""
    cluster = stuck_before_a_call()
    cluster.task(W1)["waits"] = [
        {**cluster.task(PS0)["waits"][0], "on": str(W0)},
    ]
    assert verdict_of(cluster).cause is Cause.USER_CODE
