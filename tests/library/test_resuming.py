"""A job of the library that is started again with its folder goes on where it was, with the same bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from library.same_loop import loss_of, run_jobs, small_model
from lockstep.errors import BadInput
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.checkpoint.folder import CheckpointFolder
from lockstep.runtime.checkpoint.resuming import beginning_in
from lockstep.training.export import export
from lockstep.training.server.shard_store import TorchShardStore

SHAPE = ClusterShape(2, 2)
SETTINGS = (Setting("program", "a program of one's own"),)


def normalised() -> Any:
    model = small_model()
    model.insert(1, nn.BatchNorm1d(48))
    return model


class Run:
    """Programs on a cluster with a folder; what their loops saw, and what they ended with."""

    def __init__(self, folder: Path, loops: tuple[int, ...], *, keeps: bool = True, save_steps: int = 0) -> None:
        self.seen: dict[int, list[int]] = {}
        self.models: dict[int, dict[str, Tensor]] = {}
        self.rates: dict[int, float] = {}
        self.said: list[str] = []
        self.unsaved: list[bool] = []
        self.before: Callable[[], object] = lambda: None
        """Called when the cluster has begun and no step is made."""
        self._folder, self._loops, self._keeps, self._save_steps = folder, loops, keeps, save_steps

    def __call__(self) -> Run:
        rules = RecoveryRules(saves_last=True, save_steps=self._save_steps)
        with in_process_cluster(
            SHAPE,
            TorchShardStore,
            eager=False,
            recovery=rules,
            train_dir=str(self._folder),
            settings=lambda _: SETTINGS,
        ) as cluster:
            self.before()
            run_jobs(cluster, self._body)
            self.said = cluster.said
            self.unsaved = [node.tell_unsaved() for node in cluster.servers]
        return self

    def _body(self, job: Job) -> None:
        model = normalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        job.wrap(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if self._keeps:
            job.keep(scheduler=scheduler)
        seen = self.seen.setdefault(job.worker, [])
        for count in self._loops:
            for step in job.steps(count):
                seen.append(step)
                optimizer.zero_grad()
                loss_of(model, job.worker, step).backward()
                optimizer.step()
            scheduler.step()  # between two loops, as programs with epochs do
        self.models[job.worker] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.rates[job.worker] = optimizer.param_groups[0]["lr"]


def assert_same(one: Run, other: Run) -> None:
    for worker in range(SHAPE.workers):
        for name, tensor in one.models[worker].items():
            assert torch.equal(tensor, other.models[worker][name]), f"{name} of worker {worker}"
    assert one.rates == other.rates


def versions(folder: Path) -> list[int]:
    """The checkpoints in a folder, the newest first."""
    return [int(path.name.split("-")[1]) for path in CheckpointFolder(str(folder)).complete()]


def test_a_job_goes_on_at_the_step_of_its_newest_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    whole = Run(tmp_path, (3, 3, 3), save_steps=1)()
    assert whole.seen == {0: list(range(9)), 1: list(range(9))}
    for path in CheckpointFolder(str(tmp_path)).complete():
        if int(path.name.split("-")[1]) > 5:
            shutil.rmtree(path)
    newest = versions(tmp_path)[0]
    again = Run(tmp_path, (3, 3, 3))()
    assert again.seen == {0: list(range(newest, 9)), 1: list(range(newest, 9))}
    assert any(f"resumes at step {newest}" in said for said in again.said)
    assert_same(again, whole)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole = Run(tmp_path, (6,), save_steps=1)()
    newest = CheckpointFolder(str(tmp_path)).complete()[0]
    shard = next(newest.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = versions(tmp_path)[1]
    again = Run(tmp_path, (6,))()
    assert again.seen[0] == list(range(before, 6))
    assert any(newest.name in said for said in again.said)
    assert_same(again, whole)


def test_a_job_whose_checkpoints_cannot_be_written_ends_well_and_says_that_its_last_version_is_not_saved(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, (4,), save_steps=1)
    run.before = lambda: (tmp_path / "checkpoints").write_bytes(b"a file where the folder should be")
    run()
    assert run.seen == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert run.unsaved == [True, False]
    assert len([said for said in run.said if "COULD NOT BE WRITTEN" in said]) == 1
    assert "THE LAST VERSION IS IN NO CHECKPOINT" in run.said[-1]


@pytest.mark.slow
def test_a_loop_that_has_become_longer_is_gone_on_with(tmp_path: Path) -> None:
    Run(tmp_path, (3, 2))()
    again = Run(tmp_path, (3, 4, 1))()
    assert again.seen == {0: [5, 6, 7], 1: [5, 6, 7]}


def test_a_loop_that_was_left_is_over(tmp_path: Path) -> None:
    def body(job: Job) -> None:
        model = normalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        job.wrap(model, optimizer)
        for step in job.steps(9):
            optimizer.zero_grad()
            loss_of(model, job.worker, step).backward()
            optimizer.step()
            if step == 2:
                break
        seen.append(list(job.steps(1)))

    seen: list[list[int]] = []
    for _ in range(2):
        with in_process_cluster(
            SHAPE, TorchShardStore, eager=False, recovery=RecoveryRules(saves_last=True), train_dir=str(tmp_path)
        ) as cluster:
            run_jobs(cluster, body)
    assert seen == [[3]] * 4  # of both workers, twice: the loop behind it made no step


def test_a_finished_job_has_nothing_left_to_do(tmp_path: Path) -> None:
    whole = Run(tmp_path, (4,))()
    again = Run(tmp_path, (4,))()
    assert again.seen == {0: [], 1: []}
    for name, tensor in whole.models[0].items():
        assert torch.equal(tensor, again.models[0][name]), name


def test_a_checkpoint_of_the_library_is_exported_with_the_models_own_names(tmp_path: Path) -> None:
    run = Run(tmp_path, (2,))()
    newest = CheckpointFolder(str(tmp_path)).complete()[0]
    export(newest, tmp_path / "model.safetensors")
    model = normalised()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, run.models[0][name]), name


def test_a_scheduler_that_is_not_kept_is_said_and_nothing_but_the_end_is_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, (4,), keeps=False, save_steps=1)()
    said = [one for one in run.said if "was not passed to job.keep()" in one]
    assert len(said) == 1
    assert "only its last version is saved" in said[0]
    assert len(CheckpointFolder(str(tmp_path)).complete()) == 1


def body_with(job: Job, **wrong: Any) -> None:
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.wrap(model, optimizer)
    if wrong.get("loads"):
        model.load_state_dict(normalised().state_dict())
    if wrong.get("steps"):
        loss_of(model, job.worker, 0).backward()
        optimizer.step()
    if wrong.get("publishes"):
        job.publish()
    if not wrong.get("keeps"):
        job.keep(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    list(job.steps(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"loads": True}, "would replace what this job has already trained: it resumes at step 2"),
        ({"steps": True}, "cannot be repeated, and this job was resumed at step 2"),
        ({"publishes": True}, "cannot be repeated, and this job was resumed at step 2"),
        ({"keeps": True}, "passed to job.keep\\(\\) have changed: scheduler"),
    ],
    ids=["loading", "a step", "publishing", "not keeping"],
)
def test_what_a_resumed_job_would_do_twice_is_refused(wrong: dict[str, bool], sentence: str, tmp_path: Path) -> None:
    Run(tmp_path, (2,))()
    rules = RecoveryRules(saves_last=True)
    with (
        pytest.raises(UsageError, match=sentence),
        in_process_cluster(
            SHAPE,
            TorchShardStore,
            eager=False,
            recovery=rules,
            train_dir=str(tmp_path),
            settings=lambda _: SETTINGS,
        ) as cluster,
    ):
        run_jobs(cluster, lambda job: body_with(job, **wrong))


def test_a_folder_of_the_benchmark_is_refused(tmp_path: Path) -> None:
    Run(tmp_path, (1,))()
    with pytest.raises(BadInput, match="your own program wrote it, but this run is lockstep bench"):
        beginning_in(str(tmp_path), (Setting("model", "lenet"),), lambda _: None)
    assert os.listdir(tmp_path) == ["checkpoints"]
