"""What people do in training loops, each against the same loop in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from library.same_loop import (
    BUCKET_BYTES,
    STEPS,
    TWO_SERVERS,
    Loop,
    assert_both_agree,
    assert_same_bits,
    average,
    batch,
    in_one_process,
    loss_of,
    on_a_cluster,
    plain,
    run_jobs,
    small_model,
)
from lockstep.library.job import Job
from lockstep.library.loop_position import seed_everything
from lockstep.library.served import ServedTraining
from lockstep.library.sharding import step_seed
from lockstep.protocol.core.ids import ClusterShape
from lockstep.training.server.shard_store import TorchShardStore


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_plain_loop(workers: int) -> None:
    assert_both_agree(Loop(shape=ClusterShape(1, workers)))


def test_gradients_may_be_summed_and_applied_once() -> None:
    assert_both_agree(Loop(summed=True))


def test_parameter_groups_with_their_own_rates_and_weight_decay() -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.002, "betas": (0.5, 0.9)}]
        return torch.optim.AdamW(groups, lr=0.01, fused=True)

    assert_both_agree(Loop(make_optimizer=grouped))


SCHEDULERS = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "one cycle (moves momentum too)": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_learning_rate_scheduler(scheduler: str, optimizer: Any) -> None:
    assert_both_agree(Loop(make_optimizer=optimizer, make_scheduler=SCHEDULERS[scheduler]))


def test_scheduler_made_after_wrapping_works_too() -> None:
    loop = Loop(make_scheduler=SCHEDULERS["steps"])
    rates: dict[int, Any] = {}

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(STEPS):
            plain(model, job.worker, step)
            optimizer.step()
            scheduler.step()
        rates[job.worker] = scheduler.get_last_lr()
        results[job.worker] = dict(model.named_parameters())

    results: dict[int, Any] = {}
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    assert_same_bits(list(results.values()), in_one_process(loop))
    assert rates[0] == [pytest.approx(0.1 * 0.5**3)]


def test_clipping_the_norm() -> None:
    def clipped(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    assert_both_agree(Loop(compute=clipped))


def test_clipping_values() -> None:
    def clipped(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    assert_both_agree(Loop(compute=clipped))


def test_editing_gradients_behind_the_back_of_version_counters() -> None:
    def clamped(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-0.01, 0.01)

    assert_both_agree(Loop(compute=clamped))


def test_editing_a_single_gradient_in_a_single_step() -> None:
    def edited(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        if step == 3 and worker == 1:
            assert model[2].weight.grad is not None
            model[2].weight.grad[0, 0] = 5.0

    assert_both_agree(Loop(compute=edited))


def test_replacing_a_gradient_by_another_tensor() -> None:
    def replaced(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2 + step

    assert_both_agree(Loop(compute=replaced))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulating_over_several_backward_passes(set_to_none: bool) -> None:
    def accumulated(model: Any, worker: int, step: int) -> None:
        model.zero_grad(set_to_none)
        for part in range(3):
            (loss_of(model, worker, 10 * step + part) / 3).backward()

    assert_both_agree(Loop(compute=accumulated, make_optimizer=adam))


def test_gradients_that_are_never_zeroed_go_on_adding_up() -> None:
    # Every worker's own sum goes on, as in a process of its own.
    def never_zeroed(model: Any, worker: int, step: int) -> None:
        loss_of(model, worker, step).backward()

    assert_both_agree(Loop(compute=never_zeroed))


def test_backward_that_keeps_its_graph() -> None:
    def double(model: Any, worker: int, step: int) -> None:
        model.zero_grad()
        inputs, targets = batch(worker, step)
        inputs.requires_grad_()
        loss = nn.functional.mse_loss(model(inputs), targets)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward(retain_graph=True)

    assert_both_agree(Loop(compute=double))


class Branches(nn.Module):
    """Which parameters get a gradient depends on the worker and the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(16, 32)
        self.left = nn.Linear(32, 16)
        self.right = nn.Linear(32, 16)
        self.never = nn.Linear(16, 16)

    def forward(self, inputs: Tensor, left: bool) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        result: Tensor = self.left(hidden) if left else self.right(hidden)
        return result


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_parameters_without_a_gradient_on_one_or_all_workers(optimizer: Any, bucket_bytes: int) -> None:
    def branching(model: Any, worker: int, step: int) -> None:
        model.zero_grad()
        inputs, targets = batch(worker, step)
        left = step % 3 == 0 or (step % 3 == 1 and worker == 1)
        nn.functional.mse_loss(model(inputs, left), targets).backward()

    loop = Loop(compute=branching, make_model=Branches, make_optimizer=optimizer, steps=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("library.same_loop.BUCKET_BYTES", bucket_bytes)
        assert_both_agree(loop)


def test_a_gradient_that_is_taken_back_before_the_step() -> None:
    def taken_back(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        if step % 2:
            for parameter in model[2].parameters():
                parameter.grad = None

    assert_both_agree(Loop(compute=taken_back, make_optimizer=adam))


def test_frozen_parameters_stay_and_may_be_thawed_later() -> None:
    def thawing(model: Any, worker: int, step: int) -> None:
        model[0].requires_grad_(step >= 3)
        plain(model, worker, step)

    def frozen_model() -> Any:
        model = small_model()
        model[0].requires_grad_(False)
        return model

    assert_both_agree(Loop(compute=thawing, make_model=frozen_model, make_optimizer=adam))


class Tied(nn.Module):
    """Input and output share a weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Linear(16, 32, bias=False)
        self.between = nn.Linear(32, 32)
        self.again = nn.Linear(16, 32, bias=False)
        self.again.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.between(self.embed(inputs)))
        return hidden @ self.again.weight


def test_shared_parameters() -> None:
    assert_both_agree(Loop(make_model=Tied))


class Attention(nn.Module):
    """MultiheadAttention uses the weight of its output layer without calling that layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.unsqueeze(0)
        attended, _ = self.attention(rows, rows, rows)
        normed: Tensor = self.norm(attended).squeeze(0)
        return normed


def test_modules_that_use_the_weight_of_a_child() -> None:
    assert_both_agree(Loop(make_model=Attention, make_optimizer=adam))


def batch_norm_model() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))


def test_batch_norm_keeps_its_statistics_on_each_worker() -> None:
    assert_both_agree(Loop(make_model=batch_norm_model))


def test_dropout_follows_the_seed_of_the_step() -> None:
    # All workers of this test share one process and so one random generator: one at a time.
    turn = threading.Lock()

    def dropout_model() -> nn.Module:
        torch.manual_seed(10)
        return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16))

    def dropped(model: Any, worker: int, step: int) -> None:
        for parameter in model.parameters():
            parameter.sum()  # it is here before the turn is taken: the other worker may have to compute for it
        with turn:
            seed_everything(step_seed(0, step, worker))
            plain(model, worker, step)

    assert_both_agree(Loop(compute=dropped, make_model=dropout_model))


def test_compiled_model() -> None:
    def compiled_model() -> nn.Module:
        return torch.compile(small_model(), backend="aot_eager")  # type: ignore[return-value]

    cluster = on_a_cluster(Loop(make_model=compiled_model, steps=3, shape=ClusterShape(1, 1)))
    alone = in_one_process(Loop(steps=3, shape=ClusterShape(1, 1)))
    named = [{name.removeprefix("_orig_mod."): value for name, value in result.items()} for result in cluster]
    assert_same_bits(named, alone)


def test_double_precision_and_mixed_dtypes() -> None:
    def mixed() -> Any:
        model = small_model()
        model[2].double()
        return model

    def computed(model: Any, worker: int, step: int) -> None:
        model.zero_grad()
        inputs, targets = batch(worker, step)
        hidden = model[1](model[0](inputs)).double()
        outputs = model[4](model[3](model[2](hidden)).float())
        nn.functional.mse_loss(outputs, targets).backward()

    assert_both_agree(Loop(compute=computed, make_model=mixed))


def test_closure_is_evaluated_once_and_its_loss_returned() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        losses = []
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, job.worker, step)
                loss.backward()
                return loss.detach()

            losses.append(float(optimizer.step(closure)))
        results[job.worker] = dict(model.named_parameters())
        assert len(losses) == STEPS
        assert all(loss > 0 for loss in losses)

    results: dict[int, Any] = {}
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    assert_same_bits(list(results.values()), in_one_process(Loop()))


def test_two_optimizers_in_one_job() -> None:
    """As in a GAN: each steps by itself, and the second sees what the first has done."""

    def two(model: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        first = torch.optim.Adam(model[0].parameters(), lr=0.01, fused=True)
        return first, torch.optim.SGD(model[2:].parameters(), lr=0.1)

    def body(job: Job) -> None:
        model = small_model()
        _, (first, second) = job.wrap(model, list(two(model)))
        for step in range(STEPS):
            plain(model, job.worker, step)
            first.step()
            plain(model, job.worker, step)
            second.step()
        results[job.worker] = dict(model.named_parameters())

    results: dict[int, Any] = {}
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)

    master = small_model()
    models = [small_model() for _ in range(2)]
    optimizers = two(master)
    for step in range(STEPS):
        for optimizer in optimizers:
            for worker, model in enumerate(models):
                model.load_state_dict(master.state_dict())
                plain(model, worker, step)
            average(master, models)
            optimizer.step()
    assert_same_bits(list(results.values()), dict(master.named_parameters()))


def test_buckets_leave_before_the_seal_and_are_held_once_they_are_edited() -> None:
    seen: dict[str, list[bool]] = {"plain": [], "clipped": []}

    def body_of(kind: str) -> Any:
        def body(job: Job) -> None:
            model = small_model()
            _, optimizer = job.wrap(model, sgd(model))
            training = job._training
            assert isinstance(training, ServedTraining)
            assert training.replica is not None
            for step in range(3):
                plain(model, job.worker, step)
                if kind == "clipped":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                seen[kind].append(training.replica.holding)
            again = training.replica.sent_again
            assert again == (len(training.replica.plan.buckets) if kind == "clipped" else 0)

        return body

    for kind in seen:
        with in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster:
            run_jobs(cluster, body_of(kind))
    assert seen == {"plain": [False] * 3, "clipped": [True] * 3}
    assert BUCKET_BYTES < 16 * 48 * 4
