"""A server's store with a single bucket of three parameters, and torch's own optimizer for comparison."""

from __future__ import annotations

import json
import threading

import torch

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, worker
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import make_plan
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.wire_format import WireFormat

ELEMENTS = (100_000, 300_000, 7)
ENTRIES = tuple(ParameterEntry(f"p{index}", count, "float32", 0) for index, count in enumerate(ELEMENTS))
PLAN = make_plan(ENTRIES, 1, 4 << 20)
LR = 0.05
KINDS: dict[str, str] = {
    "Adam": '{"lr": 0.1, "fused": true}',
    "AdamW": '{"lr": 0.1, "fused": true, "amsgrad": true}',
    "Adagrad": '{"lr": 0.1, "fused": true}',
    "NAdam": '{"lr": 0.1}',
    "RMSprop": '{"lr": 0.1, "momentum": 0.9}',
    "ASGD": '{"lr": 0.1}',
    "SGD": '{"lr": 0.1, "momentum": 0.9}',
}
_SECONDS = 60.0


class OneBucket:
    """The workers' gradients are given by hand."""

    def __init__(
        self, kind: str, helpers: int = 0, device: str = "cpu", wire: str = "float32", *, slots: int = 2
    ) -> None:
        assert len(PLAN.buckets) == 1
        self.wire = WireFormat(wire)
        self.store = TorchShardStore(torch.device(device), self.wire, helpers)
        layout = Layout(PLAN.hash, PLAN.bucket_bytes, ENTRIES, (OptimizerEntry(kind, KINDS[kind]),))
        room = PLAN.shard_room(0) + self.store.spare_bytes(PLAN)
        self.slots = [memoryview(bytearray(room)) for _ in range(slots)]
        self.store.prepare(layout, PLAN, 0, self.slots)
        self.version = INITIAL_STEP

    def apply(self, flats: list[torch.Tensor], without: tuple[int, ...] = ()) -> None:
        """One step; returns when it is done."""
        tasks = (CHIEF, worker(1))[: len(flats)]
        slots = (self.version % len(self.slots), (self.version + 1) % len(self.slots))
        rates = (GroupRates(("lr",), (LR,)),)
        effect = Apply(self.version, 0, tasks, (1,) * len(tasks), len(tasks), rates, *slots, without=without)
        failed: list[Exception | None] = []
        told = threading.Event()

        def done(error: Exception | None) -> None:
            failed.append(error)
            told.set()

        self.store.begin(effect, [self._leaving(flat) for flat in flats], done)
        assert told.wait(_SECONDS)
        assert failed == [None]
        self.version += 1

    def _leaving(self, flat: torch.Tensor) -> memoryview:
        """As a worker sends it: the first parameters whole, gradients in the type of the wire."""
        whole = flat.view(torch.uint8)
        sent = whole if self.version == INITIAL_STEP else self.wire.narrowed(PLAN.buckets[0], whole)
        return sent.numpy().data

    def values(self) -> list[torch.Tensor]:
        """The newest version of each parameter."""
        flat = torch.frombuffer(self.slots[self.version % len(self.slots)], dtype=torch.uint8)[: PLAN.buckets[0].nbytes]
        return [flat.view(torch.float32)[where].clone() for where in places()]


def places() -> list[slice]:
    """Where each parameter is in the bucket."""
    by_parameter = sorted(PLAN.buckets[0].pieces, key=lambda piece: piece.parameter)
    return [slice(piece.offset // 4, piece.offset // 4 + piece.elements) for piece in by_parameter]


def flat_of(step: int, task: int) -> torch.Tensor:
    """A worker's gradient."""
    generator = torch.Generator().manual_seed(100 * step + task)
    return torch.randn(PLAN.buckets[0].nbytes // 4, generator=generator)


def in_one_process(kind: str, steps: int, missing: dict[int, tuple[int, ...]]) -> list[torch.Tensor]:
    """torch's own optimizer on the separate parameters."""
    parameters = [
        torch.nn.Parameter(flat_of(INITIAL_STEP, 0)[where].clone(), requires_grad=False) for where in places()
    ]
    options = {**json.loads(KINDS[kind]), "lr": LR}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, **options)
    for step in range(steps):
        mean = (flat_of(step, 0) + flat_of(step, 1)) / 2
        for index, (parameter, where) in enumerate(zip(parameters, places(), strict=True)):
            parameter.grad = None if index in missing.get(step, ()) else mean[where].clone()
        optimizer.step()
    return [parameter.data for parameter in parameters]
