"""Jobs in which every rank trains: the bits of one process, what programs do with DDP, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from helpers.ports import free_port
from helpers.programs import Program
from library.same_loop import Loop, batch, in_one_process, loss_of, plain, run_jobs, small_model
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.checkpoint.folder import CheckpointFolder
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.export import export
from lockstep.training.ranks.saving import SaveSlot
from lockstep.training.server.mean_store import MeanStore

TWO = ClusterShape(0, 2)
pytestmark = pytest.mark.timeout(120)


def run(body: Callable[[Job], None], ranks: int = 2, on_nan: str = "report", **options: Any) -> list[str]:
    """What the job said; a folder may be among the options."""
    slot = SaveSlot()
    chosen = JobOptions(bucket_bytes=2048, on_nan=on_nan, on_nan_parameters="report", save_slot=slot)
    with in_process_cluster(ClusterShape(0, ranks), lambda: MeanStore(save=slot), **options) as cluster:
        run_jobs(cluster, body, chosen)
        return cluster.said


def adam(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain_ones = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": plain_ones}]
    return torch.optim.AdamW(groups, lr=0.01)


def clipped(model: Any, worker: int, step: int) -> None:
    plain(model, worker, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def trained_by(loop: Loop, protocol: str = "grpc") -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}

    def body(job: Job) -> None:
        model = loop.make_model()
        if job.worker:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(job.worker)  # the chief's values count
        optimizer = loop.make_optimizer(model)
        job.wrap(model, optimizer)
        for step in job.steps(loop.steps):
            loop.compute(model, job.worker, step)
            optimizer.step()
        assert job.step == loop.steps
        found[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    run(body, loop.shape.workers, protocol=protocol)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("protocol", ["grpc", "grpc+tcp", "grpc+shm", "auto"])
def test_every_rank_ends_with_the_bits_of_one_process(ranks: int, protocol: str) -> None:
    loop = Loop(make_optimizer=adam, shape=ClusterShape(0, ranks))
    expected = in_one_process(loop)
    for found in trained_by(loop, protocol).values():
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_gradients_are_clipped_after_they_are_averaged() -> None:
    """In one process the mean is clipped, as DDP's users expect; so every rank clips the same."""
    found: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in job.steps(4):
            clipped(model, job.worker, step)
            optimizer.step()
        found[job.worker] = [p.detach().clone() for p in model.parameters()]

    run(body)
    master = small_model()
    optimizer = adam(master)
    for step in range(4):
        grads = []
        for worker in range(2):
            plain(master, worker, step)
            grads.append([p.grad.clone() for p in master.parameters()])
        for parameter, first, second in zip(master.parameters(), *grads, strict=True):
            parameter.grad = (first + second) / 2
        nn.utils.clip_grad_norm_(master.parameters(), 0.1)
        optimizer.step()
    for mine in found.values():
        for one, other in zip(mine, master.parameters(), strict=True):
            assert torch.equal(one, other)


class Own(torch.optim.Optimizer):
    """An optimizer that no server knows, which works on whole matrices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.grad / p.grad.norm()


def test_any_optimizer_and_any_scheduler_stays_the_programs_own() -> None:
    found: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = Own(model.parameters())
        same_model, same = job.wrap(model, optimizer)
        assert same is optimizer
        assert same_model is model
        assert type(optimizer) is Own
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in job.steps(3):
            plain(model, job.worker, step)
            optimizer.step()
            schedule.step()
        found[job.worker] = [p.detach().clone() for p in model.parameters()]

    run(body)
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))


@pytest.mark.parametrize("way", ["accumulate", "attribute"])
def test_accumulating_averages_once_per_step(way: str) -> None:
    def compute(model: Any, worker: int, step: int) -> None:
        model.zero_grad()
        for number in range(3):
            loss_of(model, worker, 10 * step + number).backward()

    loop = Loop(compute, shape=TWO, steps=3)
    expected = in_one_process(loop)
    found: dict[int, dict[str, Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = loop.make_optimizer(model)
        job.wrap(model, optimizer)
        for step in job.steps(3):
            model.zero_grad()
            for number in range(3):
                if way == "attribute":
                    model.require_backward_grad_sync = number == 2
                    loss_of(model, job.worker, 10 * step + number).backward()
                elif number == 2:
                    loss_of(model, job.worker, 10 * step + number).backward()
                else:
                    with job.accumulate():
                        loss_of(model, job.worker, 10 * step + number).backward()
            optimizer.step()
        assert job.step == 3
        found[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    run(body)
    for mine in found.values():
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_an_update_from_gradients_of_one_rank_alone_is_refused() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        with job.accumulate():
            plain(model, job.worker, 0)
        optimizer.step()

    with pytest.raises(UsageError, match=r"gradients of this rank alone.*job\.accumulate\(\)"):
        run(body)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_with_a_closure_is_judged_by_the_backward_in_it(by_name: bool) -> None:
    """Lightning makes every step so; after a pass in ``job.accumulate()`` it was refused before its last backward."""
    found: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        with job.accumulate():
            loss_of(model, job.worker, 0).backward()

        def closure() -> float:
            loss = loss_of(model, job.worker, 1)
            loss.backward()
            return float(loss.detach())

        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert loss is not None
        assert job.step == 1
        found[job.worker] = [p.detach().clone() for p in model.parameters()]

    run(body)
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))


def test_a_closure_whose_backward_is_not_averaged_is_refused() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)

        def closure() -> float:
            with job.accumulate():
                plain(model, job.worker, 0)
            return 0.0

        optimizer.step(closure)

    with pytest.raises(UsageError, match="gradients of this rank alone"):
        run(body)


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    def body(job: Job) -> None:
        model = small_model()
        model[0].weight.requires_grad_(False)
        optimizer = adam(model)
        job.wrap(model, optimizer)
        plain(model, job.worker, 0)
        optimizer.step()
        model[0].weight.requires_grad_(True)
        plain(model, job.worker, 1)
        optimizer.step()

    with pytest.raises(UsageError, match=r"'0\.weight' was frozen when the model was wrapped.*before job\.wrap"):
        run(body)


def test_a_model_that_differs_is_named() -> None:
    def body(job: Job) -> None:
        model = small_model()
        if job.worker:
            model[0] = nn.Linear(16, 48, bias=False)
        job.wrap(model, adam(model))

    with pytest.raises(JobEndedError, match=r"worker 1.*0\.bias"):
        run(body)


def test_ranks_that_drift_apart_are_named() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in job.steps(3):
            plain(model, job.worker, step)
            optimizer.step()
            if job.worker:
                with torch.no_grad():
                    model[2].weight.mul_(1.0001)

    with pytest.raises(JobEndedError, match=r"worker 1 has other values than worker 0 in '2\.weight'") as ended:
        run(body)
    assert ended.value.outcome.reason.cause is Cause.DRIFTED


def test_publish_makes_the_chiefs_values_everyones() -> None:
    found: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in job.steps(3):
            plain(model, job.worker, step)
            optimizer.step()
            with torch.no_grad():
                model[0].weight.add_(job.worker)
            job.publish()
        found[job.worker] = [p.detach().clone() for p in model.parameters()]

    run(body)
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))


@pytest.mark.parametrize("on_nan", ["report", "skip", "stop"])
def test_a_mean_that_is_not_finite(on_nan: str) -> None:
    jobs: dict[int, Job] = {}
    values: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        jobs[job.worker] = job
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.wrap(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in job.steps(1):
            inputs, _ = batch(job.worker, 0)
            (model(inputs).sum() * (float("nan") if job.worker else 1.0)).backward()
            optimizer.step()
        values[job.worker] = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]

    if on_nan == "stop":
        with pytest.raises(JobEndedError, match=r"stopped the job: the mean gradient of '0\.weight' contains NaN"):
            run(body, on_nan=on_nan)
        return
    said = run(body, on_nan=on_nan)
    assert any("the mean gradient of '0.weight' contains NaN or infinity in step 0" in line for line in said)
    assert [job.not_finite_steps for job in jobs.values()] == [1, 1]
    assert [job.void_steps for job in jobs.values()] == [on_nan == "skip"] * 2
    assert all(bool((change == 0).all()) == (on_nan == "skip") for change in values[0])


def test_sync_batch_norm_on_cpus_is_refused_and_not_silently_local() -> None:
    def body(job: Job) -> None:
        model = small_model()
        model.insert(1, nn.SyncBatchNorm(48))
        job.wrap(model, adam(model))

    with pytest.raises(UsageError, match="SyncBatchNorm works on GPUs only"):
        run(body)


def test_a_rank_that_fails_is_told_to_all() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in job.steps(5):
            if step == 2 and job.worker == 1:
                raise KeyError("labels")
            plain(model, job.worker, step)
            optimizer.step()

    with pytest.raises(KeyError, match="labels"):
        run(body)


# -- checkpoints --


class Kept:
    """A job with a folder, whose loop has dropout, statistics and a schedule."""

    def __init__(self, folder: Path, ranks: int = 2, steps: int = 6, save_steps: int = 0) -> None:
        self.seen: dict[int, list[int]] = {}
        self.state: dict[int, dict[str, Tensor]] = {}
        rules = RecoveryRules(saves_last=True, save_steps=save_steps)
        self._steps = steps
        self.said = run(self._body, ranks, recovery=rules, train_dir=str(folder))

    def _body(self, job: Job) -> None:
        model = small_model()
        model.insert(1, nn.BatchNorm1d(48))
        optimizer = adam(model)
        job.wrap(model, optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        job.keep(schedule=schedule)
        for step in job.steps(self._steps):
            self.seen.setdefault(job.worker, []).append(step)
            plain(model, job.worker, step)
            optimizer.step()
            schedule.step()
        self.state[job.worker] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_job_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    whole = Kept(tmp_path / "whole")
    Kept(tmp_path / "parts", steps=4)
    again = Kept(tmp_path / "parts")
    assert again.seen == {0: [4, 5], 1: [4, 5]}
    assert any("resumes at step 4" in line for line in again.said)
    for rank in range(2):
        for name, tensor in whole.state[rank].items():
            assert torch.equal(again.state[rank][name], tensor), name


def test_loading_after_wrapping_is_refused_where_the_job_resumes(tmp_path: Path) -> None:
    Kept(tmp_path)

    def body(job: Job) -> None:
        model = small_model()
        model.insert(1, nn.BatchNorm1d(48))
        optimizer = adam(model)
        saved = optimizer.state_dict()
        job.wrap(model, optimizer)
        optimizer.load_state_dict(saved)

    with pytest.raises(UsageError, match=r"load_state_dict\(\) of an optimizer would replace.*resumes at step 6"):
        run(body, recovery=RecoveryRules(saves_last=True), train_dir=str(tmp_path))


def test_gradients_that_wait_for_a_later_iteration_are_no_place_to_resume(tmp_path: Path) -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        job.wrap(model, optimizer)
        for step in job.steps(4):
            loss_of(model, job.worker, step).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    said = run(body, recovery=RecoveryRules(saves_last=True, save_steps=1), train_dir=str(tmp_path))
    found = {int(path.name.split("-")[1]) for path in CheckpointFolder(str(tmp_path)).complete()}
    assert found <= {2, 4}
    assert 4 in found
    assert any("gradients that no optimizer had applied" in line for line in said)


def test_a_checkpoint_in_the_middle_and_another_number_of_ranks(tmp_path: Path) -> None:
    Kept(tmp_path, steps=5, save_steps=2)
    found = sorted(int(path.name.split("-")[1]) for path in CheckpointFolder(str(tmp_path)).complete())
    assert found[-1] == 5
    assert {2, 4} & set(found)
    again = Kept(tmp_path, ranks=3, steps=7)
    assert again.seen[2] == [5, 6]


def test_a_checkpoint_without_servers_can_be_exported(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "run")
    newest = CheckpointFolder(str(tmp_path / "run")).complete()[0]
    export(newest, tmp_path / "out.safetensors")
    exported = load_file(tmp_path / "out.safetensors")
    assert exported.keys() == kept.state[0].keys()
    for name, tensor in kept.state[0].items():
        assert torch.equal(exported[name], tensor), name


# -- as real processes --


def torchrun(ranks: int, script: Path, *flags: str) -> str:
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    with Program((sys.executable, *launcher, str(script), *flags), {"OMP_NUM_THREADS": "1"}) as program:
        finished = program.wait(110)
    assert finished.code == 0, finished
    return finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["own", "gloo"])
def test_two_ranks_have_the_bits_of_ddp_in_the_same_run(backend: str) -> None:
    printed = torchrun(2, Path(__file__).with_name("ddp_beside.py"), f"--backend={backend}")
    assert "2 ranks train, 0 serve" in printed
    for rank in range(2):
        assert f"worker {rank}: same bits after 6 steps" in printed, printed


# -- where a lost rank comes back: nothing else changes (``test_lost_ranks.py`` kills them) --


@pytest.mark.parametrize("ranks", [2, 3])
def test_where_ranks_come_back_the_bits_are_the_same(ranks: int) -> None:
    """Also with several backward passes in an iteration, and values that are published."""
    found: dict[bool, dict[int, dict[str, Tensor]]] = {False: {}, True: {}}

    def train(returns: bool) -> None:
        def body(job: Job) -> None:
            model = small_model()
            optimizer = adam(model)
            job.wrap(model, optimizer)
            for step in job.steps(4):
                plain(model, job.worker, step)
                optimizer.step()
                if step == 1:
                    plain(model, job.worker, step + 10)
                    optimizer.step()
                if step == 2:
                    job.publish()
                assert job.all_reduce(step) == step
            found[returns][job.worker] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        run(body, ranks, recovery=RecoveryRules(ranks_return=returns))

    train(False)
    train(True)
    assert len(found[True]) == ranks
    for rank, state in found[False].items():
        assert all(torch.equal(found[True][rank][name], tensor) for name, tensor in state.items())
