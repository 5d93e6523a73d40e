"""A compared program: one rank of a job without servers, with the benchmark's model and optimizer.

It is written as a program of a user's own is. The benchmark does not know the library, so it is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.benchmark.compare.solo_loop import timed
from lockstep.benchmark.compare.start_barrier import StartBarrier
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.run import choose_device, set_up_torch
from lockstep.benchmark.training.updates import OneOptimizer
from lockstep.library.join import join


def run_rank(config: BenchConfig, rank: int, addresses: Sequence[str], barrier: StartBarrier) -> None:
    """Train as one of the ranks at these addresses; the seconds of the timed steps are the result."""
    set_up_torch(config)
    bench = BenchJob(config, rank, [choose_device(config)])
    one = OneOptimizer(bench, bench.model)
    with join(worker_hosts=list(addresses), job_name="worker", task_index=rank) as job:
        job.wrap(bench.model, one.optimizer)

        def one_step(step: int) -> None:
            one.use(bench.rates(step))
            bench.forward().backward()
            one.apply()
            one.forget()

        barrier.tell_result({"seconds": timed(config, one_step, bench.device, barrier.pass_through)})
