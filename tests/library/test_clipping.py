"""Clipping the mean: with servers as without, what DDP does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from helpers.marks import others_long
from library.same_loop import BUCKET_BYTES, STEPS, average, loss_of, plain, run_jobs, small_model
from library.test_ranks import torchrun
from lockstep.library.awaited_norm import AwaitedNorm
from lockstep.library.clipping import CLIPS_ITS_OWN
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.server.mean_store import MeanStore
from lockstep.training.server.shard_store import TorchShardStore

Clip = Callable[[Any, nn.Module], Any]
ONE, TWO, RANKS = ClusterShape(1, 2), ClusterShape(2, 2), ClusterShape(0, 2)
SHAPES = [pytest.param(ONE, id="one server"), pytest.param(TWO, id="two servers"), pytest.param(RANKS, id="ranks")]
pytestmark = pytest.mark.timeout(120)


class TorchClips:
    """``job.clip_grad_...`` as torch does it, on a mean that is in ``grad``: what DDP's program calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), *args, **kwargs)

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_value_(self._model.parameters(), *args, **kwargs)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Several groups; the kernel that servers use."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


class Run:
    """One training, and what became of it."""

    def __init__(self) -> None:
        self.losses: dict[int, list[float]] = {}
        self.norms: dict[int, list[float]] = {}
        self.said: list[str] = []


def as_ddp(clip: Clip, make: Callable[[], nn.Module] = small_model, steps: int = STEPS) -> Run:
    """Two models in one process, whose gradients are averaged; then one update, as each process of DDP makes it."""
    run, master = Run(), make()
    models, optimizer = [copy.deepcopy(master) for _ in range(2)], adam(master)
    run.losses, run.norms = {0: [], 1: []}, {0: [], 1: []}
    for step in range(steps):
        for worker, model in enumerate(models):
            model.load_state_dict(master.state_dict())
            model.zero_grad()
            loss = loss_of(model, worker, step)
            loss.backward()
            run.losses[worker].append(loss.item())
        average(master, models)
        norm = clip(TorchClips(master), master)
        optimizer.step()
        for norms in run.norms.values():
            norms.append(math.nan if norm is None else float(norm))
    return run


def run_job(shape: ClusterShape, body: Callable[[Job], None], **options: Any) -> list[str]:
    make = TorchShardStore if shape.servers else MeanStore
    with in_process_cluster(shape, make, eager=not shape.servers, **options) as cluster:
        run_jobs(cluster, body, JobOptions(bucket_bytes=BUCKET_BYTES))
        return list(cluster.said)


def on_a_job(shape: ClusterShape, clip: Clip, make: Callable[[], nn.Module] = small_model, steps: int = STEPS) -> Run:
    run = Run()

    def body(job: Job) -> None:
        model = make()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        losses: list[float] = []
        norms: list[Any] = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, job.worker, step)
            loss.backward()
            losses.append(loss.item())
            norms.append(clip(job, model))
            optimizer.step()
        run.losses[job.worker] = losses
        run.norms[job.worker] = [math.nan if norm is None else float(norm) for norm in norms]

    run.said = run_job(shape, body)
    return run


def assert_like_ddp(shape: ClusterShape, run: Run, ddp: Run) -> None:
    """Bit for bit without servers; with servers within the rounding of one norm."""
    for worker in range(2):
        if not shape.servers:
            assert run.losses[worker] == ddp.losses[worker]
        assert run.losses[worker] == pytest.approx(ddp.losses[worker], abs=1e-6)
        assert run.norms[worker] == pytest.approx(ddp.norms[worker], rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "clip",
    [
        pytest.param(lambda job, _: job.clip_grad_norm_(0.1), id="norm 2"),
        pytest.param(lambda job, _: job.clip_grad_norm_(0.01, math.inf), id="norm inf"),
        pytest.param(lambda job, _: job.clip_grad_norm_(1.0, 1.0, foreach=False), id="norm 1, not foreach"),
        pytest.param(lambda job, _: job.clip_grad_norm_(1e9, foreach=True), id="nothing to clip"),
        pytest.param(lambda job, _: job.clip_grad_norm_(0.1, error_if_nonfinite=True), id="asked at once"),
        pytest.param(lambda job, _: job.clip_grad_value_(0.01), id="value"),
    ],
)
def test_losses_and_norms_are_those_of_ddp(shape: ClusterShape, clip: Clip) -> None:
    run, ddp = on_a_job(shape, clip), as_ddp(clip)
    assert_like_ddp(shape, run, ddp)
    assert CLIPS_ITS_OWN not in run.said


def test_it_matters_what_is_clipped() -> None:
    """Otherwise the tests here would show nothing: each worker's own clip leaves DDP's curve."""
    own = on_a_job(ONE, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    ddp = as_ddp(lambda job, _: job.clip_grad_norm_(0.1))
    assert max(abs(a - b) for a, b in zip(own.losses[0], ddp.losses[0], strict=True)) > 1e-4


def test_a_program_that_clips_with_torch_is_told_once_and_only_with_servers() -> None:
    def clip(_: Any, model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    assert on_a_job(ONE, clip).said.count(CLIPS_ITS_OWN) == 1
    assert CLIPS_ITS_OWN not in on_a_job(RANKS, clip).said


def test_gradients_leave_during_backward_and_nothing_is_sent_again() -> None:
    sent: dict[int, tuple[int, bool]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in range(STEPS):
            plain(model, job.worker, step)
            job.clip_grad_norm_(0.1)
            optimizer.step()
        replica = job._training.replica  # type: ignore[attr-defined]
        sent[job.worker] = (replica.sent_again, replica.holding)

    run_job(TWO, body)
    assert sent == {0: (0, False), 1: (0, False)}


@pytest.mark.parametrize("shape", SHAPES)
def test_accumulated_gradients_are_clipped_together(shape: ClusterShape) -> None:
    losses: dict[int, list[float]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        losses[job.worker] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with job.accumulate():
                (loss_of(model, job.worker, step) / 2).backward()
            loss = loss_of(model, job.worker, step + 100) / 2
            loss.backward()
            losses[job.worker].append(loss.item())
            job.clip_grad_norm_(0.1)
            optimizer.step()
        if shape.servers:
            assert job._training.replica.sent_again == 0  # type: ignore[attr-defined]

    run_job(shape, body)
    master = small_model()
    expected: dict[int, list[float]] = {0: [], 1: []}
    models, optimizer = [copy.deepcopy(master) for _ in range(2)], adam(master)
    for step in range(STEPS):
        for worker, model in enumerate(models):
            model.load_state_dict(master.state_dict())
            model.zero_grad()
            (loss_of(model, worker, step) / 2).backward()
            loss = loss_of(model, worker, step + 100) / 2
            loss.backward()
            expected[worker].append(loss.item())
        average(master, models)
        nn.utils.clip_grad_norm_(master.parameters(), 0.1)
        optimizer.step()
    for worker in range(2):
        assert losses[worker] == pytest.approx(expected[worker], abs=1e-6 if shape.servers else 0)


@pytest.mark.parametrize("shape", [ONE, TWO])
def test_a_scaler_unscales_before_the_clip(shape: ClusterShape) -> None:
    """In step 1 worker 1 finds infinity: the norm is none, and all workers skip the step."""
    ends: dict[int, list[Tensor]] = {}
    norms: dict[int, list[float]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        norms[job.worker] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, job.worker, step)
            scaler.scale(loss * math.inf if (step, job.worker) == (1, 1) else loss).backward()
            scaler.unscale_(optimizer)
            norms[job.worker].append(float(job.clip_grad_norm_(0.1)))
            scaler.step(optimizer)
            scaler.update()
        ends[job.worker] = [p.detach().clone() for p in model.parameters()]

    run_job(shape, body)
    assert [math.isfinite(norm) for norm in norms[0]] == [step != 1 for step in range(STEPS)]
    assert norms[0] == pytest.approx(norms[1], nan_ok=True)
    master = small_model()
    models, optimizer = [copy.deepcopy(master) for _ in range(2)], adam(master)
    for step in (one for one in range(STEPS) if one != 1):
        for worker, model in enumerate(models):
            model.load_state_dict(master.state_dict())
            plain(model, worker, step)
        average(master, models)
        nn.utils.clip_grad_norm_(master.parameters(), 0.1)
        optimizer.step()
    for end in ends.values():
        for one, other in zip(end, master.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), atol=1e-6, rtol=0)


def test_a_step_that_the_program_leaves_out_because_of_the_norm_is_not_made() -> None:
    """As with torch: only ``optimizer.step()`` makes a step, and every worker knows the same norm."""
    run, ddp = Run(), Run()

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        run.losses[job.worker] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, job.worker, step)
            (loss * 1000 if step in (1, 2) else loss).backward()
            run.losses[job.worker].append(loss.item())
            if job.clip_grad_norm_(0.1) > 10:
                continue
            optimizer.step()
        assert job.step == STEPS - 2

    run_job(TWO, body)
    master = small_model()
    models, optimizer = [copy.deepcopy(master) for _ in range(2)], adam(master)
    ddp.losses = {0: [], 1: []}
    for step in range(STEPS):
        for worker, model in enumerate(models):
            model.load_state_dict(master.state_dict())
            plain(model, worker, step)
            ddp.losses[worker].append(loss_of(model, worker, step).item())
        if step in (1, 2):
            continue
        average(master, models)
        nn.utils.clip_grad_norm_(master.parameters(), 0.1)
        optimizer.step()
    for worker in range(2):
        assert run.losses[worker] == pytest.approx(ddp.losses[worker], abs=1e-6)


def test_a_norm_that_is_not_finite_is_an_error_where_the_program_wants_that() -> None:
    errors: dict[int, str] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        (loss_of(model, job.worker, 0) * (math.inf if job.worker else 1.0)).backward()
        try:
            job.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            errors[job.worker] = str(error)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        plain(model, job.worker, 1)
        job.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.step()

    run_job(TWO, body)
    assert sorted(errors) == [0, 1]
    assert all("the norm of order 2.0 of the mean gradient is nan" in text for text in errors.values())


def test_two_optimizers_are_clipped_by_name() -> None:
    norms: dict[int, list[float]] = {}

    def body(job: Job) -> None:
        first, second = small_model(), small_model()
        one, two = adam(first), adam(second)
        job.wrap([first, second], [one, two])
        norms[job.worker] = []
        for step in range(2):
            plain(first, job.worker, step)
            plain(second, job.worker, step + 50)
            norms[job.worker].append(float(job.clip_grad_norm_(0.1, optimizer=one)))
            one.step()
            norms[job.worker].append(float(job.clip_grad_norm_(0.1, optimizer=two)))
            two.step()
        with pytest.raises(UsageError, match="several optimizers"):
            job.clip_grad_norm_(0.1)

    run_job(TWO, body)
    first = as_ddp(lambda job, _: job.clip_grad_norm_(0.1), steps=1).norms[0][0]
    assert norms[0] == norms[1]
    assert norms[0][0] == pytest.approx(first, rel=1e-5)
    assert norms[0][1] != norms[0][0]


# -- what is refused --


def refused(act: Callable[[Job, Any, Any], None], match: str, shape: ClusterShape = ONE) -> None:
    """Every worker does the same, and is refused."""

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        plain(model, job.worker, 0)
        with pytest.raises(UsageError, match=match):
            act(job, model, optimizer)
        plain(model, job.worker, 0)
        optimizer.step()

    run_job(shape, body)


def edit(job: Job, model: Any, optimizer: Any) -> None:
    job.clip_grad_norm_(1.0)
    model[2].weight.grad.mul_(2)
    optimizer.step()


def edit_behind_torchs_back(job: Job, model: Any, optimizer: Any) -> None:
    job.clip_grad_norm_(1.0)
    model[2].weight.grad.data.mul_(2)
    optimizer.step()


def edit_after_value(job: Job, model: Any, optimizer: Any) -> None:
    job.clip_grad_value_(1.0)
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    optimizer.step()


def clip_twice(job: Job, model: Any, optimizer: Any) -> None:
    job.clip_grad_value_(1.0)
    job.clip_grad_norm_(1.0)


def scale_too_late(job: Job, model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, job.worker, 0)).backward()
    job.clip_grad_norm_(1.0)
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (edit, r"the gradient of '2.weight' was changed after job.clip_grad_norm_\(\)"),
        (edit_behind_torchs_back, r"was changed after job.clip_grad_norm_\(\)"),
        (edit_after_value, r"the gradient of '2.weight' was changed after job.clip_grad_value_\(\)"),
        (clip_twice, r"job.clip_grad_norm_\(\) was called after job.clip_grad_value_\(\)"),
        (scale_too_late, r"call scaler.unscale_\(optimizer\) before it"),
        (lambda job, *_: job.clip_grad_norm_(-1.0), "give a number that is not negative"),
        (lambda job, *_: job.clip_grad_norm_(1.0, 0.0), "give 1, 2 or inf"),
        (lambda job, *_: job.clip_grad_norm_(1.0, optimizer=adam(small_model())), "was not wrapped"),
    ],
)
def test_what_cannot_be_clipped_is_refused_by_name(act: Callable[[Job, Any, Any], None], match: str) -> None:
    refused(act, match)


def test_a_mean_of_unknown_workers_cannot_be_clipped() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        plain(model, job.worker, 0)
        with pytest.raises(UsageError, match="with backup workers"):
            job.clip_grad_norm_(1.0)
        optimizer.step()

    run_job(ONE, body, aggregate=1)


@pytest.mark.parametrize("limit", [None, 2.0], ids=["not at all", "to another norm"])
def test_a_worker_that_clips_otherwise_ends_the_job(limit: float | None) -> None:
    """Both are named, also while the others wait for the norm."""

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in range(3):
            plain(model, job.worker, step)
            if job.worker == 0:
                float(job.clip_grad_norm_(1.0))
            elif limit is not None:
                float(job.clip_grad_norm_(limit))
            optimizer.step()

    with pytest.raises(JobEndedError, match="clipped to norm 1") as caught:
        run_job(TWO, body)
    assert caught.value.outcome.reason.cause is Cause.OUT_OF_STEP


# -- the norm itself --


def test_the_norm_is_awaited_where_it_is_used_and_then_a_tensor_like_any_other() -> None:
    asked: list[int] = []

    def find() -> float:
        asked.append(1)
        return 2.5

    norm = AwaitedNorm.on_its_way(find, torch.zeros(1))
    assert isinstance(norm, Tensor)
    assert asked == []
    assert norm.item() == 2.5
    assert norm > 2
    assert f"{norm:.1f}" == "2.5"
    assert type(norm * 2) is Tensor
    assert torch.stack([norm, norm]).tolist() == [2.5, 2.5]
    assert copy.deepcopy(norm) == 2.5
    assert asked == [1]


# -- as real processes, beside DDP --


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("servers", others_long([1, 2], [2]))
def test_a_small_gpt_stays_on_the_curve_of_ddp(servers: int) -> None:
    printed = torchrun(2 + servers, Path(__file__).with_name("clip_beside.py"), f"--servers={servers}")
    for number in range(2):
        (line,) = [line for line in printed.splitlines() if f"worker {number}: " in line and "losses differ" in line]
        assert int(line.split(" steps clipped")[0].split()[-1]) > 6
        assert float(line.split()[-1]) < 1e-6
