"""What used to be silent is said: no step at all, a parameter frozen on one worker only, an iteration left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from library.both_shapes import RANKS, SERVED, both_shapes, run_in
from library.same_loop import momentum, plain, small_model
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.outcome import JobEndedError

pytestmark = pytest.mark.timeout(120)


def update_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)


def update_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad


def update_with_another_optimizer(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (update_by_hand, r"changed parameter '0\.weight' without a call of the wrapped optimizer's step\(\)"),
        (update_with_another_optimizer, r"changed parameter '0\.weight' without a call.*train alone.*job\.wrap\(\)"),
        (update_data, "'0.weight' was moved to different memory"),
    ],
)
def test_a_worker_that_would_train_alone_is_named_at_its_second_backward(update: Any, why: str) -> None:
    passes: list[int] = []

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, momentum(model))
        for step in range(20):
            passes.append(job.worker)
            plain(model, job.worker, step)
            update(model)

    with pytest.raises(UsageError, match=why):
        run_in(SERVED, body)
    assert passes.count(0) <= 2
    assert passes.count(1) <= 2


def test_a_program_that_never_makes_a_step_does_not_end_well() -> None:
    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, momentum(model))
        for step in range(5):  # gradients add up, which is allowed
            plain(model, job.worker, step)

    with pytest.raises(JobEndedError, match=r"never called step\(\) of a wrapped optimizer.*after each backward pass"):
        run_in(SERVED, body)


def test_programs_that_make_their_updates_otherwise_are_left_alone() -> None:
    """With servers ``job.publish()`` brings them to all; without, everybody's are the same."""

    def publishing(job: Job) -> None:
        model = small_model()
        job.wrap(model, momentum(model))
        for step in range(3):
            plain(model, 0, step)
            update_by_hand(model)
            job.publish()

    def by_hand(job: Job) -> None:
        model = small_model()
        job.wrap(model, momentum(model))
        for step in range(3):
            plain(model, job.worker, step)
            update_by_hand(model)

    run_in(SERVED, publishing)
    said = run_in(RANKS, by_hand)
    assert sum("3 backward passes were averaged, but no wrapped optimizer made a step" in line for line in said) == 1


@both_shapes
def test_a_job_without_a_single_backward_pass_ends_well(shape: ClusterShape) -> None:
    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, momentum(model))

    assert not any("backward" in line for line in run_in(shape, body))


@both_shapes
@pytest.mark.parametrize("where", [0, 1])
def test_a_parameter_frozen_on_one_worker_only_is_named_at_the_start(shape: ClusterShape, where: int) -> None:
    def body(job: Job) -> None:
        model = small_model()
        if job.worker == where:
            model[2].bias.requires_grad_(False)
        job.wrap(model, momentum(model))

    has = r"only the chief has" if where == 0 else "the chief does not have"
    with pytest.raises(JobEndedError, match=rf"worker 1 .*{has} frozen parameter '2\.bias'.*freeze the same") as ended:
        run_in(shape, body)
    assert ended.value.outcome.reason.cause is Cause.MISMATCH


@both_shapes
@pytest.mark.parametrize("skips", [0, 1])
def test_an_iteration_left_out_on_one_worker_is_named_in_its_step(shape: ClusterShape, skips: int) -> None:
    made: dict[int, int] = {}

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, optimizer := momentum(model))
        for step in job.steps(20):
            if step == 1 and job.worker == skips:
                continue
            made[job.worker] = step
            plain(model, job.worker, step)
            optimizer.step()

    with pytest.raises(JobEndedError) as ended:
        run_in(shape, body)
    text = str(ended.value)
    assert "in step 2 of job.steps()" in text
    assert "in step 1 of job.steps()" in text
    assert "every worker must make the same calls in the same order" in text
    assert ended.value.outcome.reason.cause is Cause.OUT_OF_STEP
    assert made[1 - skips] <= 2
    assert made[skips] <= 3
