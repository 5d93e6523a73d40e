"""PyTorch's own DistributedDataParallel around our model: gloo on CPUs, NCCL on GPUs.

A plain loop, as in its documentation, with the settings that make it fastest here: gradients are views of its buckets,
the graph does not change, and buffers are not sent (Lockstep does not send them either).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lockstep.benchmark.compare.solo_loop import timed
from lockstep.benchmark.compare.start_barrier import StartBarrier
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.run import choose_device, set_up_torch
from lockstep.benchmark.training.updates import LocalUpdates
from lockstep.training.ranks.listening import reach_store, serve_store


def run_ddp(config: BenchConfig, rank: int, addresses: Sequence[str], patience: float, barrier: StartBarrier) -> None:
    """Train as one of the ranks at these addresses; ``patience``: seconds that a collective call may take."""
    world = len(addresses)
    set_up_torch(config, keeps_memory=False)  # as DDP's users have it
    device = choose_device(config)
    if device.type == "cuda":
        if torch.cuda.device_count() < world:
            found = torch.cuda.device_count()
            cannot = f"NCCL needs one GPU for each of the {world} workers, but there are {found}"
            barrier.tell_result({"cannot": cannot})
            return
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    _join(rank, addresses, patience, "nccl" if device.type == "cuda" else "gloo", barrier)
    try:
        barrier.tell_result({"seconds": _train(config, rank, device, barrier)})
    finally:
        distributed.destroy_process_group()


def _join(rank: int, addresses: Sequence[str], patience: float, backend: str, barrier: StartBarrier) -> None:
    """Rank 0 holds the store, on a port that the system picks; the others receive its number."""
    limit, world = timedelta(seconds=patience), len(addresses)
    if rank == 0:
        store = serve_store(addresses[0], 0, world, patience)
        barrier.tell_port(store.port)
    else:
        store = reach_store(addresses[0], barrier.hear_port(), world, patience)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def _train(config: BenchConfig, rank: int, device: torch.device, barrier: StartBarrier) -> float:
    job = BenchJob(config, rank, [device])
    updates = LocalUpdates(job)
    job.model = DistributedDataParallel(
        job.model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,
    )

    def one_step(step: int) -> None:
        updates.begin(step, job.rates(step))
        job.forward().backward()
        updates.end()

    def begin() -> None:
        barrier.pass_through()
        distributed.barrier()

    return timed(config, one_step, device, begin)
