"""How long a server takes for one step: the reduction and the update of all its buckets, nothing else.

    python bench/server_update.py --millions=124 --threads 1 2
    python bench/server_update.py --device=cuda
    python bench/server_update.py --overwrite --clip

One store, as a server has it, with every gradient already in host memory. Prints the median of some steps in
milliseconds for each optimizer, choice of kernels, and number of threads. ``--overwrite``: each version over the one
before, as where a lost worker ends the job. ``--clip``: the norm of the mean is measured first, and clips it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lockstep.protocol.core.effects import Apply, Measure
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, worker
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.norms import combined
from lockstep.protocol.core.plan import Bucket, Plan, make_plan
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

    def __init__(self, plan: Plan, entry: OptimizerEntry, threads: int, asked: argparse.Namespace) -> None:
        self._plan, self._workers, self._clips, self._version = plan, asked.workers, asked.clip, INITIAL_STEP
        device = torch.device(asked.device)
        self.store = TorchShardStore(device if device.type == "cuda" else None, helpers=threads - 1)
        room = plan.shard_room(0) + self.store.spare_bytes(plan) + 64
        self._slots = [memoryview(bytearray(room)) for _ in range(1 if asked.overwrite else 2)]
        layout = Layout(plan.hash, plan.bucket_bytes, plan.parameters, (entry,))
        self.store.prepare(layout, plan, 0, self._slots)
        self._gradients = [torch.randn(plan.arena_bytes // 4) for _ in range(self._workers)]

    def step(self) -> tuple[float, float]:
        """Apply all buckets; returns the seconds until the last was measured and until it was done."""
        began = time.perf_counter()
        given = self._workers if self._version != INITIAL_STEP else 1
        scale = 1.0
        if self._clips and self._version != INITIAL_STEP:
            norms = _Pending.all([partial(self._measure, bucket, given) for bucket in self._plan.buckets])
            scale = min(1.0, 1.0 / combined(norms, 2.0))
        measured = time.perf_counter()
        tasks = (CHIEF, *map(worker, range(1, given)))
        old, new = (version % len(self._slots) for version in (self._version, self._version + 1))
        rates = (GroupRates(("lr",), (0.001,)),)

        def begin(bucket: Bucket, one: _Pending) -> None:
            effect = Apply(self._version, bucket.id, tasks, (1,) * given, given, rates, old, new, scale=scale)
            self.store.begin(effect, self._lent(bucket, given), lambda error: one.done(0.0, error))

        _Pending.all([partial(begin, bucket) for bucket in self._plan.buckets])
        self._version += 1
        return measured - began, time.perf_counter() - began

    def _measure(self, bucket: Bucket, given: int, one: _Pending) -> None:
        effect = Measure(self._version, bucket.id, (1,) * given, given, 2.0, 1)
        self.store.measure(effect, self._lent(bucket, given), one.done)

    def _lent(self, bucket: Bucket, given: int) -> list[memoryview]:
        where = slice(bucket.arena_offset // 4, (bucket.arena_offset + bucket.nbytes) // 4)
        return [gradient[where].numpy().data.cast("B") for gradient in self._gradients[:given]]


class _Pending:
    """One bucket that is being measured or updated."""

    def __init__(self) -> None:
        self._told: list[tuple[float, Exception | None]] = []

    @classmethod
    def all(cls, begin: Sequence[Callable[[_Pending], None]]) -> list[float]:
        """Begin all of these, and wait for all."""
        pending = [cls() for _ in begin]
        for call, one in zip(begin, pending, strict=True):
            call(one)
        return [one.wait() for one in pending]

    def done(self, norm: float, error: Exception | None) -> None:
        self._told.append((norm, error))

    def wait(self) -> float:
        deadline = time.monotonic() + _SECONDS
        while not self._told:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a bucket was not updated within {_SECONDS:g} s")
            time.sleep(0.0001)
        norm, error = self._told[0]
        if error is not None:
            raise error
        return norm


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
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--clip", action="store_true")
    asked = parser.parse_args()
    keep_compiler_out()
    torch.set_num_threads(1)
    plan = plan_of(asked.millions, asked.bucket_mb)
    print(f"{plan.arena_bytes // 4 / 1e6:.0f} M numbers, {len(plan.buckets)} buckets, {asked.workers} worker(s)")
    print("| optimizer | kernels | threads | ms | least | most | of it the norm |\n|---|---|---|---|---|---|---|")
    for kind in asked.optimizers:
        for kernels in asked.kernels:
            entry = OptimizerEntry(kind, json.dumps({"lr": 0.001, **_KERNELS[kernels]}))
            for threads in asked.threads if asked.device == "cpu" else [1]:
                server = Server(plan, entry, threads, asked)
                with contextlib.closing(server.store):
                    for _ in range(3):
                        server.step()
                    steps = [server.step() for _ in range(asked.steps)]
                found = [1000 * whole for _, whole in steps]
                norms = 1000 * statistics.median(norm for norm, _ in steps)
                row = [statistics.median(found), min(found), max(found), norms]
                print(f"| {kind} | {kernels} | {threads} | {' | '.join(f'{ms:.0f}' for ms in row)} |", flush=True)
                del server


if __name__ == "__main__":
    main()
