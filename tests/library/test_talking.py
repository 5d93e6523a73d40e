"""What workers tell each other: the same values on all, in both shapes, and what is said where they do not all come."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cluster import in_process_cluster
from library.same_loop import momentum, plain, run_jobs, small_model
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.calls import most_bytes
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.watch.reporting import EVENTS
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.training.server.mean_store import MeanStore
from lockstep.training.server.shard_store import TorchShardStore

QUICK = WatchSettings(tick=0.2, notice=0.3, first_steps=0.5, patience=0.6, ask=3.0)
SERVED, RANKS = ClusterShape(1, 2), ClusterShape(0, 2)
pytestmark = pytest.mark.timeout(120)


def run(shape: ClusterShape, body: Callable[[Job], None], **options: Any) -> None:
    store = TorchShardStore if shape.servers else MeanStore
    with in_process_cluster(shape, store, eager=not shape.servers, **options) as cluster:
        run_jobs(cluster, body, JobOptions(bucket_bytes=2048))


def train(job: Job, steps: int = 2, in_step: Callable[[int], None] = lambda _: None) -> None:
    job.wrap(model := small_model(), optimizer := momentum(model))
    for step in job.steps(steps):
        plain(model, job.worker, step)
        optimizer.step()
        in_step(step)


def all_say(shape: ClusterShape, say: Callable[[Job], Any]) -> list[Any]:
    """What each worker got, before a model is wrapped."""
    found: dict[int, Any] = {}

    def body(job: Job) -> None:
        found[job.worker] = say(job)
        train(job, 1)

    run(shape, body)
    return [found[index] for index in range(shape.workers)]


@pytest.mark.parametrize("shape", [SERVED, RANKS, ClusterShape(1, 1), ClusterShape(0, 1), ClusterShape(0, 3)], ids=str)
def test_every_worker_gets_the_same_in_both_shapes(shape: ClusterShape) -> None:
    workers = shape.workers

    def say(job: Job) -> list[Any]:
        job.barrier()
        return [
            job.all_reduce(float(job.worker)),
            job.all_reduce(job.worker, "sum"),
            job.all_reduce(job.worker == 0, op="max", name="any"),
            job.all_reduce(torch.full((2, 2), float(job.worker)), "sum").tolist(),
            job.broadcast({"rates": [0.1, 0.2], "who": job.worker}, source=workers - 1),
            job.broadcast("text" if job.is_chief else None),
            job.gather({"worker": job.worker, "of": ("a", None)}),
        ]

    total = sum(range(workers))
    expected = [
        total / workers,
        total,
        True,
        [[float(total)] * 2] * 2,
        {"rates": [0.1, 0.2], "who": workers - 1},
        "text",
        [{"worker": index, "of": ("a", None)} for index in range(workers)],
    ]
    assert all_say(shape, say) == [expected] * workers


@pytest.mark.parametrize("shape", [SERVED, RANKS], ids=str)
def test_workers_stop_early_together_inside_and_outside_of_steps(shape: ClusterShape) -> None:
    stopped: dict[int, tuple[int, int]] = {}

    def body(job: Job) -> None:
        job.wrap(model := small_model(), optimizer := momentum(model))
        best, epochs = math.inf, 0
        for epoch in range(5):
            for step in job.steps(3):
                plain(model, job.worker, step)
                optimizer.step()
                if job.all_reduce(epoch == 2 and job.worker == 1, "max"):
                    break
            loss = job.all_reduce(float(abs(epoch - 1) + job.worker), name="validation")
            epochs += 1
            if loss > best:
                break
            best = loss
        stopped[job.worker] = (epochs, job.step)

    run(shape, body)
    assert stopped == {0: (3, 7), 1: (3, 7)}


def in_order(values: list[float]) -> float:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values)


def test_sums_are_made_in_the_order_of_workers() -> None:
    values = [0.1, 1e16, -1e16]
    assert in_order(values) != in_order(values[::-1])
    got = all_say(ClusterShape(0, 3), lambda job: job.all_reduce(values[job.worker]))
    assert got == [in_order(values)] * 3


def differ(body: Callable[[Job], None], shape: ClusterShape = SERVED) -> str:
    """Why the job ends."""
    with pytest.raises(JobEndedError) as ended:
        run(shape, body)
    reason = ended.value.outcome.reason
    assert reason.cause is Cause.OTHER_CALL
    return reason.text


@pytest.mark.parametrize("shape", [SERVED, RANKS], ids=str)
def test_two_workers_that_do_not_make_the_same_call_are_named_at_once(shape: ClusterShape) -> None:
    def operations(job: Job) -> None:
        job.barrier(name="here") if job.worker else job.gather(1, name="here")

    def forms(job: Job) -> None:
        job.all_reduce(torch.zeros(2 + job.worker), name="loss")

    def names(job: Job) -> None:
        job.all_reduce(1.0, name=f"loss {job.worker}")

    def lines(job: Job) -> None:
        if job.worker:
            job.all_reduce(1.0)
        else:
            job.all_reduce(1.0)

    text = differ(operations, shape)
    assert "barrier 'here' (test_talking.py:" in text
    assert "gather 'here' (test_talking.py:" in text
    text = differ(forms, shape)
    assert "mean of float32 [2]" in text
    assert "mean of float32 [3]" in text
    text = differ(names, shape)
    assert "'loss 0'" in text
    assert "'loss 1'" in text
    assert "from the same line or with the same name" in differ(lines, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SERVED, RANKS], ids=str)
def test_a_worker_that_skips_a_call_or_finishes_without_it_is_named(shape: ClusterShape) -> None:
    def skips(job: Job) -> None:
        train(job, 2, lambda step: job.barrier(name=f"step {step}") if step or job.worker else None)

    def finishes(job: Job) -> None:
        train(job, 1)
        if job.worker:
            job.barrier(name="last")

    text = differ(skips, shape)
    assert "'step 0'" in text
    text = differ(finishes, shape)
    assert "worker 0 has finished, but worker 1 is waiting for it in barrier 'last' (test_talking.py:" in text


def wait_for_ever(job: Job) -> None:
    """As far as the job can know."""
    pause = threading.Event()
    while job._node.outcome is None:
        pause.wait(0.05)


@pytest.mark.timed
def test_who_has_not_come_is_in_the_notice_and_the_deadline_ends_the_job(tmp_path: Path) -> None:
    """Worker 1 is stuck before its model is wrapped, when nobody waits for anything but the call."""

    def body(job: Job) -> None:
        if job.worker:
            wait_for_ever(job)
        job.barrier(name="start")

    watch = replace(QUICK, notice=0.2, first_steps=0.2, patience=0.1)  # patience is ten times longer before a step
    options: dict[str, Any] = {"watch": watch, "stall_after": 1.0, "user_code_timeout": 1.0, "startup_timeout": 4.0}
    with pytest.raises(JobEndedError) as ended:
        run(SERVED, body, run_folder=str(tmp_path), **options)
    assert ended.value.outcome.reason.cause is Cause.USER_CODE
    assert ended.value.outcome.culprit == "/job:worker/replica:0/task:1"
    text = (tmp_path / EVENTS).read_text()
    told = [json.loads(line)["text"] for line in text.splitlines()]
    assert any("worker 0 is waiting for worker 1 in barrier 'start' (test_talking.py:" in one for one in told), told
    assert any("wait_for_ever" in one for one in told), told


@pytest.mark.timed
@pytest.mark.parametrize("shape", [SERVED, RANKS], ids=str)
def test_a_worker_that_goes_on_with_its_steps_instead_is_named(shape: ClusterShape) -> None:
    def body(job: Job) -> None:
        train(job, 12, lambda step: job.barrier(name="odd") if step == 8 and not job.worker else None)

    with pytest.raises(JobEndedError) as ended:
        run(shape, body, watch=QUICK)
    outcome = ended.value.outcome
    assert (outcome.reason.cause, outcome.culprit) == (Cause.OTHER_CALL, "/job:worker/replica:0/task:1")
    assert "worker 0 waits in barrier 'odd' (test_talking.py:" in outcome.reason.text
    assert "while worker 1 waits for version" in outcome.reason.text


def test_the_end_of_the_job_ends_a_call() -> None:
    def body(job: Job) -> None:
        if job.worker:
            job.fail("has had enough")
        else:
            job.barrier()

    with pytest.raises(JobEndedError, match="has had enough"):
        run(SERVED, body)


def test_what_cannot_be_said_is_refused_with_a_remedy() -> None:
    def body(job: Job) -> None:
        wrong: list[tuple[Callable[[], Any], str]] = [
            (lambda: job.all_reduce(1.0, "product"), "use one of: mean, sum, max, min"),
            (lambda: job.all_reduce("text"), "job.gather"),  # type: ignore[call-overload]
            (lambda: job.all_reduce(torch.zeros(2, dtype=torch.complex64), "max"), "no order"),
            (lambda: job.gather(object()), "it found object"),
            (lambda: job.gather(torch.zeros(2, 2).to_sparse()), "to_dense"),
            (lambda: job.broadcast(1, source=2), "numbered from 0 to 1"),
            (lambda: job.gather(bytes(3)), "it found bytes"),
            (lambda: job.all_reduce(torch.zeros(most_bytes(2))), r"job.process_group\(\)"),
        ]
        for call, remedy in wrong:
            with pytest.raises(UsageError, match=remedy):
                call()
        train(job, 1)
        job.close()
        with pytest.raises(UsageError, match=r"after job\.close"):
            job.barrier()

    run(RANKS, body)


def test_a_tensor_stays_where_it_is_and_as_it_is() -> None:
    def say(job: Job) -> list[Tensor]:
        own = torch.arange(3.0, requires_grad=True) + job.worker
        found = job.all_reduce(own, "max")
        assert own.requires_grad
        assert torch.equal(own.detach(), torch.arange(3.0) + job.worker)
        return [found, job.broadcast(torch.tensor(7, dtype=torch.int16) if job.is_chief else None)]

    for highest, seven in all_say(RANKS, say):
        assert torch.equal(highest, torch.arange(3.0) + 1)
        assert (seven.dtype, seven.item(), highest.requires_grad) == (torch.int16, 7, False)
