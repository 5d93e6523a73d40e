"""What a program announces with ``job.busy()`` never ends the job; what it does not announce does, after its time."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from helpers.cluster import InProcessCluster, in_process_cluster
from helpers.waiting import wait_until
from library.same_loop import momentum, plain, run_jobs, small_model
from lockstep.library.job import Job
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import Cause, Source
from lockstep.protocol.core.ids import CHIEF, ClusterShape
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.watch.reporting import EVENTS
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.training.server.shard_store import TorchShardStore

QUICK = WatchSettings(tick=0.2, notice=0.3, first_steps=0.5, patience=0.6, ask=3.0)
SHAPE = ClusterShape(1, 2)


def evaluate(job: Job, seconds: float) -> None:
    """It takes so long, or until the job has ended for this worker."""
    began = time.monotonic()
    wait_until(
        lambda: time.monotonic() - began > seconds or job._node.outcome is not None,
        seconds + 30.0,
        "the end of the evaluation",
    )


def evaluate_after_eight_steps(cluster: InProcessCluster, seconds: float, *, announced: bool) -> None:
    """The chief then waits for something of its own, and the others for the chief."""

    def body(job: Job) -> None:
        model, optimizer = job.wrap(model := small_model(), momentum(model))
        for step in job.steps(12):
            plain(model, job.worker, step)
            optimizer.step()
            if step == 8 and job.is_chief:
                with job.busy("evaluation") if announced else nullcontext():
                    evaluate(job, seconds)

    run_jobs(cluster, body)


def events_in(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


@pytest.mark.timed
def test_an_evaluation_that_is_announced_gets_a_notice_and_the_job_goes_on(tmp_path: Path) -> None:
    with in_process_cluster(
        SHAPE,
        TorchShardStore,
        eager=False,
        run_folder=str(tmp_path),
        watch=QUICK,
        stall_after=2.0,
        user_code_timeout=2.0,
    ) as cluster:
        evaluate_after_eight_steps(cluster, 4.0, announced=True)
    events = events_in(tmp_path)
    assert {event["kind"] for event in events} == {"notice"}
    told = next(event for event in events if event["cause"] == Cause.BUSY.value)
    assert "worker 0 is busy, as its program announced: evaluation" in told["text"].lower()


@pytest.mark.slow
@pytest.mark.timed
def test_one_that_is_not_announced_ends_the_job_after_user_code_timeout(tmp_path: Path) -> None:
    with (
        in_process_cluster(
            SHAPE,
            TorchShardStore,
            eager=False,
            run_folder=str(tmp_path),
            watch=QUICK,
            stall_after=4.0,
            user_code_timeout=5.5,
        ) as cluster,
        pytest.raises(JobEndedError) as ended,
    ):
        evaluate_after_eight_steps(cluster, 30.0, announced=False)
    outcome = ended.value.outcome
    assert (outcome.reason.source, outcome.reason.cause) == (Source.STALL, Cause.USER_CODE)
    assert outcome.culprit == str(CHIEF)


def test_a_block_that_is_announced_is_over_when_it_ends() -> None:
    seen: list[tuple[Doing, str]] = []

    def body(job: Job) -> None:
        job.wrap(model := small_model(), momentum(model))
        with job.busy("evaluation"):
            seen.append(job._node.main.now()[:2])
        seen.append(job._node.main.now()[:2])

    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    assert seen[0] == (Doing.BUSY, "evaluation")
    assert seen[1][0] is not Doing.BUSY
