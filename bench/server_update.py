"""How long a server takes for one step: the reduction and the update of all its buckets, nothing else.

    python bench/server_update.py --millions=124 --threads 1 2
    python bench/server_update.py --device=cuda

One store, as a server has it, with every gradient already in host memory. Prints the median of some steps in
milliseconds for each optimizer, choice of kernels, and number of threads..
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time

import torch

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, worker
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.training.server.bare_optimizer import keep_compiler_out
from lockstep.training.server.shard_store import TorchShardStore

_PARAMETER = 1 << 20
"""Elements of each of the model's parameters."""
_SECONDS = 600.0
_KERNELS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "single": {"fused": False}, "torch's": {}}
MEBIBYTE = 1 << 20


def plan_of(millions: float, bucket_mb: int) -> Plan:
    count = max(1, round(millions * 1e6 / _PARAMETER))
    entries = tuple(ParameterEntry(f"p{index}", _PARAMETER, "float32", 0) for index in range(count))
    return make_plan(entries, 1, bucket_mb * MEBIBYTE)


class Server:
    """A store with all its memory, and the steps that it makes."""

    def __init__(self, plan: Plan, entry: OptimizerEntry, workers: int, threads: int, device: torch.device) -> None:
        self._plan, self._workers, self._version = plan, workers, INITIAL_STEP
        self.store = TorchShardStore(device if device.type == "cuda" else None, helpers=threads - 1)
        room = plan.shard_room(0) + self.store.spare_bytes(plan) + 64
        self._slots = [memoryview(bytearray(room)) for _ in range(2)]
        layout = Layout(plan.hash, plan.bucket_bytes, plan.parameters, (entry,))
        self.store.prepare(layout, plan, 0, self._slots)
        self._gradients = [torch.randn(plan.arena_bytes // 4) for _ in range(workers)]

    def step(self) -> float:
        """Apply all buckets; returns the seconds until the last was done."""
        began = time.perf_counter()
        given = self._workers if self._version != INITIAL_STEP else 1
        tasks = (CHIEF, *map(worker, range(1, given)))
        pending = []
        for bucket in self._plan.buckets:
            where = slice(bucket.arena_offset // 4, (bucket.arena_offset + bucket.nbytes) // 4)
            lent = [gradient[where].numpy().data.cast("B") for gradient in self._gradients[:given]]
            slots = (self._version % 2, (self._version + 1) % 2)
            rates = (GroupRates(("lr",), (0.001,)),)
            pending.append(_Pending())
            effect = Apply(self._version, bucket.id, tasks, (1,) * given, given, rates, *slots)
            self.store.begin(effect, lent, pending[-1].done)
        for one in pending:
            one.wait()
        self._version += 1
        return time.perf_counter() - began


class _Pending:
    """One bucket that is being updated."""

    def __init__(self) -> None:
        self._told: list[Exception | None] = []

    def done(self, error: Exception | None) -> None:
        self._told.append(error)

    def wait(self) -> None:
        deadline = time.monotonic() + _SECONDS
        while not self._told:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a bucket was not updated within {_SECONDS:g} s")
            time.sleep(0.0001)
        if self._told[0] is not None:
            raise self._told[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--millions", type=float, default=124, help="elements of the model")
    parser.add_argument("--optimizers", nargs="*", default=["AdamW"])
    parser.add_argument("--kernels", nargs="*", default=["fused", "single"], choices=sorted(_KERNELS))
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, 2, 4, 8, cores} & set(range(cores + 1))))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--bucket_mb", type=int, default=64)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    keep_compiler_out()
    torch.set_num_threads(1)
    plan = plan_of(asked.millions, asked.bucket_mb)
    print(f"{plan.arena_bytes // 4 / 1e6:.0f} M numbers, {len(plan.buckets)} buckets, {asked.workers} worker(s)")
    print("| optimizer | kernels | threads | ms | least | most |\n|---|---|---|---|---|---|")
    for kind in asked.optimizers:
        for kernels in asked.kernels:
            entry = OptimizerEntry(kind, json.dumps({"lr": 0.001, **_KERNELS[kernels]}))
            for threads in asked.threads if asked.device == "cpu" else [1]:
                server = Server(plan, entry, asked.workers, threads, torch.device(asked.device))
                with contextlib.closing(server.store):
                    for _ in range(3):
                        server.step()
                    found = [1000 * server.step() for _ in range(asked.steps)]
                row = [statistics.median(found), min(found), max(found)]
                print(f"| {kind} | {kernels} | {threads} | {' | '.join(f'{ms:.0f}' for ms in row)} |", flush=True)
                del server


if __name__ == "__main__":
    main()
