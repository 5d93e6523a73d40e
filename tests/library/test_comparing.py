"""A program in a comparison: the job that stands in for Lockstep's, and the clock on its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.library.comparing import compared_arguments
from lockstep.library.job import Job
from lockstep.library.join import JoinArguments
from lockstep.library.stand_in import StandInJob
from lockstep.library.step_clock import StepClock
from lockstep.runtime.compared import ComparedRun, Shape, read_parts

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def _own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock puts its own function there; put torch's back."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)


def a_run(folder: Path, warm_up: int = 2, steps: int = 3) -> ComparedRun:
    return ComparedRun(shape=Shape.SINGLE, servers=0, warm_up=warm_up, steps=steps, folder=folder)


def train(job: StandInJob, steps: int, optimizers: int = 1) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    chosen = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model][:optimizers]
    job.wrap(model, chosen)
    for _ in job.steps(steps):
        model(torch.randn(2, 3)).sum().backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_the_stand_in_has_every_public_name_of_a_job() -> None:
    public = {name for name in dir(Job) if not name.startswith("_")} - {"make_step", "close_at_exit"}
    assert public <= set(dir(StandInJob(Shape.SINGLE, ALONE)))


def test_a_job_of_one_process_talks_to_itself() -> None:
    job = StandInJob(Shape.SINGLE, ALONE)
    job.barrier()
    assert job.all_reduce(3, "sum") == 3
    assert job.broadcast({"rate": 0.1}) == {"rate": 0.1}
    assert job.gather("here") == ["here"]
    assert job.process_group().size() == 1
    job.close()


def test_the_program_ends_with_its_last_timed_step(tmp_path: Path) -> None:
    run, job = a_run(tmp_path), StandInJob(Shape.SINGLE, ALONE)
    job.on_wrap = StepClock(run, job.worker).attach
    with pytest.raises(SystemExit) as ended:
        train(job, 1000)
    assert not ended.value.code
    assert job.step == 5
    parts = read_parts(run.times_of(0))
    assert parts.steps == 3
    assert min(parts.forward, parts.backward, parts.optimizer, parts.rest) > 0
    assert parts.forward + parts.backward + parts.averaging + parts.optimizer < parts.step


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    run, job = a_run(tmp_path), StandInJob(Shape.SINGLE, ALONE)
    job.on_wrap = StepClock(run, job.worker).attach
    with pytest.raises(SystemExit):
        train(job, 1000, optimizers=2)
    assert read_parts(run.times_of(0)).steps == 3


@pytest.mark.parametrize(("made", "timed"), [(4, 2), (2, 0)])
def test_a_program_that_ends_early_leaves_the_steps_it_made(tmp_path: Path, made: int, timed: int) -> None:
    run, job = a_run(tmp_path), StandInJob(Shape.SINGLE, ALONE)
    clock = StepClock(run, job.worker)
    job.on_wrap = clock.attach
    train(job, made)
    clock.conclude()
    assert (read_parts(run.times_of(0)).steps if run.times_of(0).exists() else 0) == timed


def test_a_forward_without_gradients_is_no_part_of_training(tmp_path: Path) -> None:
    run, job = a_run(tmp_path, warm_up=1, steps=1), StandInJob(Shape.SINGLE, ALONE)
    clock = StepClock(run, job.worker)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.on_wrap = clock.attach
    job.wrap(model, optimizer)
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(SystemExit):
        optimizer.step()
    assert read_parts(run.times_of(0)).forward == 0


def test_a_comparison_saves_nothing_and_ignores_lists_of_hosts() -> None:
    asked = JoinArguments(
        ps_hosts=("a:1",), worker_hosts=("b:1",), job_name="worker", task_index=0, train_dir="/data", bucket_mb=16
    )
    compared = compared_arguments(asked, 2)
    assert (compared.servers, compared.job_name, compared.train_dir, compared.bucket_mb) == (2, "", None, 16)
    assert compared.launched


def test_a_comparison_leaves_out_what_only_the_other_shape_has() -> None:
    asked = JoinArguments(device="gpu", backend="gloo")
    served, ranks = compared_arguments(asked, 1), compared_arguments(asked, 0)
    assert (served.device, served.backend) == ("gpu", None)
    assert (ranks.device, ranks.backend) == ("cpu", "gloo")


def test_shares_and_steps_are_as_in_a_job() -> None:
    job = StandInJob(Shape.LIMIT, {"RANK": "1", "WORLD_SIZE": "2"})
    assert [batch.tolist() for batch in job.shard(range(4), 2)] == [[0, 1], [2, 3]]
    assert list(job.steps(2)) == [0, 1]
    drawn = [torch.rand(1).item() for _ in job.steps(2)]
    assert drawn[0] != drawn[1]
    assert (job.worker, job.workers, job.is_chief) == (1, 1, False)
