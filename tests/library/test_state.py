"""Saving and loading in the middle of training: the parameters and the optimizer's state live on the servers."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

from helpers.cluster import in_process_cluster
from library.same_loop import (
    STEPS,
    TWO_SERVERS,
    Loop,
    assert_same_bits,
    in_one_process,
    plain,
    run_jobs,
    small_model,
)
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.optimizer_state import RemoteState
from lockstep.protocol.core.plan import Bucket
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.server.shard_store import TorchShardStore


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_of_the_optimizer_is_what_one_process_has() -> None:
    saved: dict[int, Any] = {}

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, adam(model))
        for step in range(STEPS):
            plain(model, job.worker, step)
            optimizer.step()
        saved[job.worker] = through_a_file(optimizer.state_dict())

    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)

    kept: list[torch.optim.Optimizer] = []

    def remembered(model: nn.Module) -> torch.optim.Optimizer:
        kept.append(adam(model))
        return kept[0]

    in_one_process(Loop(make_optimizer=remembered))
    expected = kept[0].state_dict()
    for state in saved.values():
        assert state["param_groups"] == expected["param_groups"]
        assert state["state"].keys() == expected["state"].keys()
        for number, values in expected["state"].items():
            for name, value in values.items():
                assert torch.equal(state["state"][number][name], value), f"{name} of parameter {number}"


@pytest.mark.parametrize("where", ["same job", "another job"])
def test_training_goes_on_from_a_saved_state_with_the_same_bits(where: str) -> None:
    saves: dict[int, Any] = {}
    results: dict[int, Any] = {}

    def first_half(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, adam(model))
        for step in range(3):
            plain(model, job.worker, step)
            optimizer.step()
        saves[job.worker] = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if where == "same job":
            for step in range(20, 22):  # away from the path that is saved
                plain(model, job.worker, step)
                optimizer.step()
            second_half(job, model, optimizer)

    def second_half(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(copy.deepcopy(saves[0]["model"]))
        optimizer.load_state_dict(copy.deepcopy(saves[0]["optimizer"]))
        for step in range(3, STEPS):
            plain(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    def resumed(job: Job) -> None:
        model = small_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0 + job.worker)
        _, optimizer = job.wrap(model, adam(model))
        second_half(job, model, optimizer)

    bodies = [first_half] if where == "same job" else [first_half, resumed]
    for body in bodies:
        with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
            run_jobs(cluster, body)
    assert_same_bits(list(results.values()), in_one_process(Loop(make_optimizer=adam)))


def test_state_survives_parameters_that_moved_apart() -> None:
    """One of two layers in a bucket got no gradient for a while: its count of steps is its own, saved and loaded."""
    saves: list[Any] = []

    def compute(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)
        if step in (1, 2):
            model[2].zero_grad()

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, adam(model))
        for step in range(4):
            compute(model, job.worker, step)
            optimizer.step()
        saved = through_a_file(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        saves.append(saved["state"])
        for step in range(4, STEPS):
            compute(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    results: dict[int, Any] = {}
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    assert {float(state["step"]) for state in saves[0].values()} == {2.0, 4.0}
    assert_same_bits(list(results.values()), in_one_process(Loop(make_optimizer=adam, compute=compute)))


@pytest.mark.parametrize("loaded", ["before wrap", "in training"])
def test_nobody_sees_half_of_a_state_that_the_chief_is_sending(loaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chief is slow between two buckets, over which parameters extend; another worker asks meanwhile."""
    began, asked = threading.Event(), threading.Event()
    put = RemoteState._put

    def slow_put(self: RemoteState, bucket: Bucket, packed: bytes) -> None:
        put(self, bucket, packed)
        if not began.is_set():
            began.set()
            asked.wait(0.5)  # unless it has to wait for this one, as it should

    monkeypatch.setattr(RemoteState, "_put", slow_put)
    source = small_model()
    before = adam(source)
    plain(source, 0, 0)
    before.step()
    state = copy.deepcopy(before.state_dict())
    found: list[Any] = []

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adam(model)
        if loaded == "before wrap" and job.is_chief:  # on the chief only: it sends it for all
            optimizer.load_state_dict(copy.deepcopy(state))
        _, optimizer = job.wrap(model, optimizer)
        if loaded == "in training":
            optimizer.load_state_dict(copy.deepcopy(state))
        if not job.is_chief:
            assert began.wait(20)
            found.append(copy.deepcopy(optimizer.state_dict()["state"]))
            asked.set()
        job.barrier()

    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    (found_state,) = found
    assert found_state.keys() == state["state"].keys()
    for number, values in state["state"].items():
        assert all(torch.equal(found_state[number][name], value) for name, value in values.items()), number


def test_loading_on_one_worker_only_is_refused_by_name() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, adam(model))
        saved = copy.deepcopy(model.state_dict())
        plain(model, job.worker, 0)
        optimizer.step()
        if job.is_chief:
            model.load_state_dict(saved)
        plain(model, job.worker, 1)
        optimizer.step()

    with (
        in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster,
        pytest.raises(JobEndedError, match=r"load_state_dict\(\).*every worker must make the same calls"),
    ):
        run_jobs(cluster, body)


def test_parameters_changed_by_the_program_are_refused_unless_published() -> None:
    def clipping_weights(publish: bool) -> Any:
        def body(job: Job) -> None:
            model = small_model()
            _, optimizer = job.wrap(model, adam(model))
            for step in range(STEPS):
                plain(model, job.worker, step)
                optimizer.step()
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
                if publish:
                    job.publish()
            results[job.worker] = dict(model.named_parameters())

        return body

    results: dict[int, Any] = {}
    with (
        in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster,
        pytest.raises(UsageError, match=r"your program changed parameter '0\.weight' in step 1.*job\.publish"),
    ):
        run_jobs(cluster, clipping_weights(publish=False))
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, clipping_weights(publish=True))

    def clamped_master(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model)

        def clamp(*_: object) -> None:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(clamp)
        return optimizer

    assert_same_bits(list(results.values()), in_one_process(Loop(make_optimizer=clamped_master)))
