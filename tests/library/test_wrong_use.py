"""The wrong use that people will try gets one clear sentence, at the first step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.cluster import in_process_cluster
from library.same_loop import TWO_SERVERS, batch, plain, run_jobs, small_model
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.sharding import MapShard
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore

ALONE = ClusterShape(1, 1)


def ended(job: Job) -> JobEndedError:
    """Waits until the job is over."""
    assert isinstance(job._node, WorkerNode)
    return JobEndedError(job._node.wait_until_ended())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def refused(body: Callable[[Job], None], sentence: str, shape: ClusterShape = ALONE) -> None:
    with (
        in_process_cluster(shape, TorchShardStore, eager=False) as cluster,
        pytest.raises(UsageError, match=sentence),
    ):
        run_jobs(cluster, body)


def test_wrapping_inside_the_loop() -> None:
    def body(job: Job) -> None:
        model = small_model()
        for _ in job.steps(3):
            job.wrap(model, sgd(model))

    refused(body, "after training began; call it before the loop")


def test_wrapping_twice() -> None:
    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, sgd(model))
        job.wrap(model, sgd(model))

    refused(body, r"called twice; wrap everything at once")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot run on parameter servers: it evaluates the loss several times"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor cannot run on parameter servers: it works on whole rows"),
        (lambda p: torch.optim.SparseAdam(list(p)), "SparseAdam cannot run.*sparse gradients"),
        (
            lambda p: type("MyAdam", (torch.optim.Adam,), {})(p),
            "certain optimizers of torch.optim, and .*MyAdam is not one of them",
        ),
        (lambda p: 0.1, "takes a torch optimizer, or a list of them, not float"),
    ],
    ids=["LBFGS", "Adafactor", "SparseAdam", "a class of one's own", "no optimizer"],
)
def test_optimizers_that_servers_cannot_run(make: Any, why: str) -> None:
    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, make(model.parameters()))

    refused(body, why)


def test_calling_step_twice() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        plain(model, 0, 0)
        optimizer.step()
        optimizer.step()

    refused(body, r"optimizer\.step\(\) was called twice for the same gradients")


def test_gradients_set_by_hand_are_no_second_step() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        plain(model, 0, 0)
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        assert run_jobs(cluster, body)


def test_moving_the_model_after_wrapping() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        model.to("meta")
        optimizer.step()

    refused(body, "'0.weight' was moved from cpu to meta after job.wrap")


def test_converting_the_model_after_wrapping() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        model.double()
        optimizer.step()

    refused(body, "'0.weight' was moved to different memory after job.wrap")


def test_parameter_added_to_the_optimizer_later() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    refused(body, "a parameter was added to the optimizer after job.wrap")


def test_parameter_added_to_the_model_later() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        model.append(nn.Linear(16, 16))
        plain(model, 0, 0)
        optimizer.step()

    refused(body, "the model has 8 parameters, but had 6 when it was wrapped")


def test_sparse_gradients() -> None:
    def body(job: Job) -> None:
        model = nn.Sequential(nn.Embedding(8, 16, sparse=True))
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    refused(body, "the gradient of '0.weight' is sparse.*sparse=False")


def test_stepping_after_the_job_was_closed_uses_the_optimizer_itself() -> None:
    """After closing, model and optimizer are the program's own again."""

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        plain(model, 0, 0)
        optimizer.step()
        job.close()
        before = model[0].weight.detach().clone()
        plain(model, 0, 1)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)
        assert type(optimizer) is torch.optim.SGD

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)


def job_ends(body: Callable[[Job], None]) -> list[str]:
    """What each worker's program is told when the job ends badly, in the order of workers."""
    told: dict[int, str] = {}
    both = threading.Barrier(2, timeout=20)

    def guarded(job: Job) -> None:
        try:
            body(job)
            job.close()
        except JobEndedError as ended:
            told[job.worker] = str(ended)
            both.wait()
            raise

    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster, pytest.raises(JobEndedError):
        run_jobs(cluster, guarded)
    return [told[0], told[1]]


def test_different_models_on_two_workers() -> None:
    def body(job: Job) -> None:
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16 if job.is_chief else 8))
        job.wrap(model, sgd(model))

    for sentence in job_ends(body):
        assert "the model of worker 1 differs" in sentence
        assert "parameter 2 is '1.weight' (512 x float32, group 0)" in sentence
        assert "'1.weight' (256 x float32, group 0)" in sentence


def test_different_values_of_what_is_not_trained() -> None:
    def body(job: Job) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        model.get_buffer("1.running_mean").fill_(float(job.worker))
        job.wrap(model, sgd(model))

    for sentence in job_ends(body):
        assert (
            "worker 1 starts with a different model from the chief's: buffer '1.running_mean', which is not" in sentence
        )


def test_another_number_of_steps_on_one_worker() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        for step in range(4 if job.is_chief else 2):
            plain(model, job.worker, step)
            optimizer.step()

    for sentence in job_ends(body):
        assert "worker 1 stopped after 2 steps while worker 0 goes on with step 2" in sentence


def test_two_optimizers_in_another_order_on_one_worker() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, both = job.wrap(model, [sgd(model[0]), sgd(model[2])])
        plain(model, job.worker, 0)
        for optimizer in both if job.is_chief else reversed(both):
            optimizer.step()

    for sentence in job_ends(body):
        assert "step() of optimizer" in sentence
        assert "every worker must make the same calls in the same order" in sentence


def test_leaving_out_a_step_on_one_worker() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        for step in job.steps(4):
            if step == 1 and not job.is_chief:
                continue
            plain(model, job.worker, step)
            optimizer.step()

    for sentence in job_ends(body):
        assert "step() in step 2 of job.steps()" in sentence
        assert "step() in step 1 of job.steps()" in sentence


def shuffled_program(job: Job, *, seed: int, looks_elsewhere: bool = False) -> None:
    model = small_model()
    _, optimizer = job.wrap(model, sgd(model))
    data = job.shard(list(range(32)), 4, shuffle=True, seed=seed)
    other = job.shard(list(range(32)), 4, shuffle=True, seed=seed + 5)
    assert isinstance(data, MapShard)
    assert isinstance(other, MapShard)
    for step in job.steps(3):
        data[step]
        if looks_elsewhere:
            other[step + 7]
        plain(model, job.worker, step)
        optimizer.step()


def test_another_seed_of_the_shuffled_data_on_one_worker() -> None:
    for sentence in job_ends(lambda job: shuffled_program(job, seed=job.worker)):
        assert "32 examples in batches of 4, shuffled with seed 0" in sentence
        assert "32 examples in batches of 4, shuffled with seed 1" in sentence


def test_other_data_that_only_one_worker_looks_at_is_its_own_business() -> None:
    with in_process_cluster(ClusterShape(1, 2), TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, lambda job: shuffled_program(job, seed=3, looks_elsewhere=job.is_chief))


def test_the_exit_code_of_a_program_is_told_to_the_others() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        with contextlib.suppress(SystemExit), job:
            for step in range(4):
                if step == 2 and not job.is_chief:
                    raise SystemExit(5)
                plain(model, job.worker, step)
                optimizer.step()
        raise ended(job)

    for sentence in job_ends(body):
        assert "worker 1 called sys.exit(5) in " in sentence
        assert "test_wrong_use.py, line " in sentence


def test_what_a_program_raises_is_told_to_the_others() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        for step in range(4):
            if step == 2 and not job.is_chief:
                job.fail("failed with KeyError: 'labels'")
                raise ended(job)
            plain(model, job.worker, step)
            optimizer.step()

    for sentence in job_ends(body):
        assert "step 2: worker 1 failed with KeyError: 'labels'" in sentence


def test_backward_through_a_graph_of_the_step_before_fails() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        inputs, targets = batch(0, 0)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
