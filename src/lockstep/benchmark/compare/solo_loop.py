"""A worker that does not communicate and has its own optimizer: the limit, and the single process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lockstep.benchmark.compare.start_barrier import StartBarrier
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.run import choose_device, set_up_torch
from lockstep.benchmark.training.updates import LocalUpdates


def run_solo(config: BenchConfig, rank: int, barrier: StartBarrier) -> None:
    """Train alone; the seconds of the timed steps are the result."""
    set_up_torch(config)
    job = BenchJob(config, rank, [choose_device(config)])
    updates = LocalUpdates(job)

    def one_step(step: int) -> None:
        updates.begin(step, job.rates(step))
        job.forward().backward()
        updates.end()

    seconds = timed(config, one_step, job.device, barrier.pass_through)
    barrier.tell_result({"seconds": seconds})


def timed(
    config: BenchConfig, one_step: Callable[[int], None], device: torch.device, begin: Callable[[], None]
) -> float:
    """Seconds of the timed steps, after the warm-up and whatever ``begin`` waits for."""
    run = config.run
    for step in range(run.num_warmup_batches):
        one_step(step)
    _finish(device)
    begin()
    started = time.perf_counter()
    for step in range(run.num_warmup_batches, run.steps):
        one_step(step)
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
