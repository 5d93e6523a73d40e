"""Gradient scalers: infinity in one worker's gradients makes all workers skip the step together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.cluster import in_process_cluster
from library.same_loop import STEPS, TWO_SERVERS, assert_same_bits, average, loss_of, run_jobs, small_model
from lockstep.library.clipping import CLIPS_ITS_OWN
from lockstep.library.job import Job
from lockstep.training.server.shard_store import TorchShardStore

OVERFLOWS_IN = {1: 1, 4: 0}
"""In step 1 on worker 1, in step 4 on worker 0."""


def scaled_loss(model: nn.Module, scaler: Any, worker: int, step: int) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, worker, step)
    if OVERFLOWS_IN.get(step) == worker:
        loss = loss * float("inf")
    return scaler.scale(loss)


@pytest.mark.parametrize("unscale_first", [True, False], ids=["unscale and clip", "step alone"])
def test_scaler_gives_the_bits_of_one_process(unscale_first: bool) -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        job.wrap(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaled_loss(model, scaler, job.worker, step).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        results[job.worker] = dict(model.named_parameters())
        scales[job.worker] = scaler.get_scale()
        assert job.void_steps == 1
        assert job.not_finite_steps == 0  # the scaler's business, nothing to report

    results: dict[int, Any] = {}
    scales: dict[int, float] = {}
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
        assert set(cluster.said) == ({CLIPS_ITS_OWN} if unscale_first else set())
    assert scales == {0: 512.0, 1: 512.0}  # each backs off once, in the step in which it found infinity itself

    master, models = small_model(), [small_model(), small_model()]
    optimizer = torch.optim.Adam(master.parameters(), lr=0.01, fused=True)  # the kernel that servers use
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        if step in OVERFLOWS_IN:
            continue
        for worker, model in enumerate(models):
            model.load_state_dict(master.state_dict())
            model.zero_grad()
            scaled_loss(model, scaler, worker, step).backward()
            if unscale_first:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        average(master, models)
        optimizer.step()
    assert_same_bits(list(results.values()), dict(master.named_parameters()))
