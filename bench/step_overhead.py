"""What a step costs when nothing is computed: microseconds per step, and how they grow with workers, buckets, servers.

    python bench/step_overhead.py [--steps=300] [--repeats=3] [--protocol=grpc] [--profile]

The whole cluster lives in this process (real nodes, real sockets), with buckets of 64 bytes, so that only Python's
work is left. Two numbers per row: wall time of a step, and processor time of the whole process for a step; on a busy
machine only the second means anything. ``--profile`` adds the functions in which the loops spend their time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.cluster import InProcessCluster, in_process_cluster
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.replica import Replica, Trained

ELEMENTS = 16
"""Numbers in a bucket: 64 bytes, the smallest bucket there is."""
WARM_UP = 20
ENTRY = OptimizerEntry("SGD", json.dumps({"lr": 0.1}))
RATES = (GroupRates(("lr",), (0.1,)),)


@dataclass(frozen=True, slots=True)
class Case:
    servers: int
    workers: int
    buckets: int


CASES = (
    Case(1, 1, 1),
    Case(1, 2, 1),
    Case(1, 4, 1),
    Case(1, 8, 1),
    Case(1, 2, 4),
    Case(1, 2, 16),
    Case(1, 2, 64),
    Case(2, 2, 16),
    Case(4, 2, 16),
)


class Clock:
    """Begins when every worker has warmed up, ends when each has done its steps."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers, self._note)
        self.moments: list[tuple[float, float]] = []

    def _note(self) -> None:
        self.moments.append((time.perf_counter(), time.process_time()))


def train(node: WorkerNode, case: Case, steps: int, clock: Clock) -> None:
    """Steps without a model: every bucket is filled by hand and handed over."""
    parameters = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(case.buckets)]
    trained = [Trained(f"p{index}", parameter, 0) for index, parameter in enumerate(parameters)]
    node.wait_until_member()
    replica = Replica(node, trained, (ENTRY,), 4 * ELEMENTS, own_copy=False)
    replica.start()
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            clock.barrier.wait(60.0)
        replica.begin(step, RATES)
        for bucket in replica.plan.buckets:
            node.produced(step, bucket.id)
        node.seal(step)
        node.wait_version(step + 1)
        replica._binding.use_all()  # which gives back what a server lent: it overwrites that next
    clock.barrier.wait(60.0)
    replica.close()
    node.finish(WARM_UP + steps)


def measure(case: Case, steps: int, protocol: str) -> tuple[float, float]:
    """Microseconds per step: wall time, processor time."""
    clock = Clock(case.workers)
    with in_process_cluster(ClusterShape(case.servers, case.workers), TorchShardStore, protocol=protocol) as cluster:
        run(cluster, case, steps, clock)
    (wall, processor), (wall_end, processor_end) = clock.moments
    return 1e6 * (wall_end - wall) / steps, 1e6 * (processor_end - processor) / steps


def run(cluster: InProcessCluster, case: Case, steps: int, clock: Clock) -> None:
    cluster.run(lambda node: train(node, case, steps, clock))


def profile(case: Case, steps: int, protocol: str) -> None:
    """The loops' threads under cProfile, all of them together."""
    found: list[cProfile.Profile] = []
    original = TaskLoop._run

    def profiled(self: TaskLoop) -> None:
        profiler = cProfile.Profile(time.thread_time)
        found.append(profiler)
        profiler.runcall(original, self)

    TaskLoop._run = profiled  # type: ignore[method-assign]
    try:
        measure(case, steps, protocol)
    finally:
        TaskLoop._run = original  # type: ignore[method-assign]
    total = pstats.Stats(*found)
    total.sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--protocol", default="grpc", help="a name of --server_protocol")
    parser.add_argument("--case", default="", help="servers,workers,buckets: only this row")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = (Case(*map(int, arguments.case.split(","))),) if arguments.case else CASES
    if arguments.profile:
        profile(cases[0] if arguments.case else Case(1, 2, 16), arguments.steps, arguments.protocol)
        return
    print("| servers | workers | buckets | wall time of a step, us | processor time of a step, us |")
    print("|---|---|---|---|---|")
    for case in cases:
        found = [measure(case, arguments.steps, arguments.protocol) for _ in range(arguments.repeats)]
        wall, processor = (statistics.median(one[which] for one in found) for which in (0, 1))
        print(f"| {case.servers} | {case.workers} | {case.buckets} | {wall:.0f} | {processor:.0f} |", flush=True)


if __name__ == "__main__":
    main()
