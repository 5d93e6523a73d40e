"""What it costs to average gradients between ranks: our own transports beside gloo's all_reduce, in turns.

    python bench/rank_average.py [--ranks=2] [--megabytes=40] [--bucket_mb=4] [--steps=20] [--rounds=5]
                                 [--protocol=auto] [--profile]

Each rank is a process with one thread for torch. A step hands over every bucket at once, as backward does at its end,
and waits for all means. The two systems take turns; the table has the medians of wall time, and the processor time of
all ranks, which also means something on a busy machine. ``--profile``: where rank 0's training thread spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing as mp
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.cluster import Front
from helpers.ports import free_ports
from lockstep.protocol.core.ids import CHIEF, worker
from lockstep.protocol.core.messages import Layout, ParameterEntry
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.mean_store import MEAN, MeanStore
from lockstep.training.tensors import as_tensor

PARAMETER_ELEMENTS = 1 << 14
"""Parameters of 64 kB: small enough for any size of buckets."""

Step = Callable[[int], None]


class OwnRank:
    """Steps over our own transports."""

    def __init__(self, options: argparse.Namespace, rank: int, hosts: tuple[str, ...]) -> None:
        spec = ClusterSpec(worker_hosts=hosts, protocol=options.protocol)
        reporter = TaskReporter.none()
        self._front = Front(worker(rank), hosts[rank], reporter)
        config = NodeConfig(cluster=spec.for_task(worker(rank)), settings=())
        self.node = WorkerNode(config, lambda text: print(text, file=sys.stderr), reporter, MeanStore)
        self.plan = _plan(options)
        self.node.start()
        self.node.wait_until_member()
        layout = Layout(self.plan.hash, self.plan.bucket_bytes, self.plan.parameters, (MEAN,))
        assert self.node.means is not None
        self.means = self.node.means
        self.means.prepare(self.plan, layout)
        assert self.node.gradients is not None
        self._arena = as_tensor(self.node.gradients.buffer[: self.plan.arena_bytes], torch.float32)
        self._arena.fill_(rank)
        if self.node.task == CHIEF:
            self.node.offer_initial()
        self.node.wait_version(0)
        self.means.release()

    def step(self, step: int) -> None:
        node = self.node
        node.begin_step(step)
        for bucket in self.plan.buckets:
            node.produced(step, bucket.id)
        node.seal(step)
        node.wait_version(step + 1)
        for bucket in self.plan.buckets:
            self.means.of(bucket.id)
        self.means.release()

    def close(self, steps: int) -> None:
        self.node.finish(steps)
        self.node.close()
        self._front.close()


class GlooRank:
    """The same with torch.distributed: one all_reduce a bucket, as DDP has it."""

    def __init__(self, options: argparse.Namespace, rank: int, meeting: str) -> None:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)
        self.plan = _plan(options)
        self._arena = torch.full((self.plan.arena_bytes // 4,), float(rank))
        self._ranks = options.ranks

    def step(self, _step: int) -> None:
        views = [self._arena[b.arena_offset // 4 : (b.arena_offset + b.nbytes) // 4] for b in self.plan.buckets]
        works = [dist.all_reduce(view, async_op=True) for view in views]
        for view, work in zip(views, works, strict=True):
            assert work is not None
            work.wait()
            view.div_(self._ranks)

    def close(self, _steps: int) -> None:
        dist.destroy_process_group()


def _plan(options: argparse.Namespace) -> Plan:
    parameters = max(1, int(options.megabytes * (1 << 20) / 4 / PARAMETER_ELEMENTS))
    entries = [ParameterEntry(f"p{i}", PARAMETER_ELEMENTS, "float32", 0) for i in range(parameters)]
    return make_plan(entries, options.ranks, int(options.bucket_mb * (1 << 20)))


def _rank(options: argparse.Namespace, rank: int, hosts: tuple[str, ...], meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    systems: dict[str, Any] = {"lockstep": OwnRank(options, rank, hosts), "gloo": GlooRank(options, rank, meeting)}
    done = dict.fromkeys(systems, 0)
    while (name := pipe.recv()) is not None:
        steps = options.steps
        profile = cProfile.Profile() if options.profile and rank == 0 and name == "lockstep" else None
        began, used = time.perf_counter(), time.process_time()
        if profile is not None:
            profile.enable()
        for _ in range(steps):
            systems[name].step(done[name])
            done[name] += 1
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        pipe.send(((time.perf_counter() - began) / steps, (time.process_time() - used) / steps))
    for name, system in systems.items():
        system.close(done[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--bucket_mb", type=float, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--protocol", default="auto")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    ports = free_ports(options.ranks + 1)
    hosts = tuple(f"127.0.0.1:{port}" for port in ports[:-1])
    meeting = f"tcp://127.0.0.1:{ports[-1]}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(options.ranks):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_rank, args=(options, rank, hosts, meeting, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    found: dict[str, list[tuple[float, float]]] = {"lockstep": [], "gloo": []}
    for turn in range(options.rounds + 1):
        for name, rows in found.items():
            for pipe in pipes:
                pipe.send(name)
            answers = [pipe.recv() for pipe in pipes]
            if turn:  # the first turn warms up
                rows.append((max(wall for wall, _ in answers), sum(used for _, used in answers)))
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    for name, rows in found.items():
        wall, used = (statistics.median(row[i] for row in rows) for i in range(2))
        fastest = min(row[0] for row in rows)
        told = f"{1000 * wall:8.2f} ms a step (fastest {1000 * fastest:.2f}), processors {1000 * used:8.2f} ms"
        print(f"{name:10} {told}")


if __name__ == "__main__":
    main()
