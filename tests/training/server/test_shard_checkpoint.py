"""A server's shard goes to disk and comes back, on any number of servers, and goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import Bucket, Plan, make_plan
from lockstep.runtime.checkpoint.tensor_file import write_tensors
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.wire_format import WireFormat

ENTRIES = (
    ParameterEntry("first.weight", 100, "float32", 0),
    ParameterEntry("first.bias", 7, "float32", 1),
    ParameterEntry("empty", 0, "float32", 0),
    ParameterEntry("second.weight", 333, "float32", 0),
)
RATES = (GroupRates(("lr",), (0.1,)), GroupRates(("lr",), (0.05,)))


class Servers:
    """The stores of so many servers, fed with the same gradients by parameter."""

    def __init__(self, count: int, name: str, start: int = INITIAL_STEP, wire: str = "float32") -> None:
        self.plan: Plan = make_plan(ENTRIES, count, 256)
        optimizer = OptimizerEntry(name.split()[0], OPTIMIZERS[name])
        layout = Layout(self.plan.hash, 256, ENTRIES, (optimizer,) * 2)
        self.wire = WireFormat(wire)
        self.stores = [TorchShardStore(wire=self.wire) for _ in range(count)]
        self.slots = []
        for index, store in enumerate(self.stores):
            nbytes = max(1, self.plan.shard_room(index))
            self.slots.append((memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))))
            store.prepare(layout, self.plan, index, self.slots[-1])
        self.version = start

    def apply(self) -> None:
        generator = torch.Generator().manual_seed(self.version + 10)
        given = [torch.randn(entry.elements, generator=generator) for entry in ENTRIES]
        for bucket in self.plan.buckets:
            flat = torch.zeros(bucket.nbytes // 4)
            for piece in bucket.pieces:
                values = given[piece.parameter][piece.first : piece.first + piece.elements]
                flat[piece.offset // 4 : piece.offset // 4 + piece.elements] = values
            slots = (self.version % 2, (self.version + 1) % 2)
            effect = Apply(self.version, bucket.id, (CHIEF,), (1,), 1, RATES, *slots)
            failed: list[Exception | None] = []
            self.stores[bucket.server].begin(effect, [self._leaving(bucket, flat)], failed.append)
            assert failed == [None], "on a processor an update is done when the call returns"
        self.version += 1

    def _leaving(self, bucket: Bucket, flat: torch.Tensor) -> memoryview:
        """As a worker sends it: the first parameters whole, gradients in the type of the wire."""
        if self.version == INITIAL_STEP:
            return flat.numpy().data.cast("B")
        return self.wire.narrowed(bucket, flat.view(torch.uint8)).numpy().data

    def values(self) -> list[torch.Tensor]:
        found = [torch.zeros(entry.elements) for entry in ENTRIES]
        for bucket in self.plan.buckets:
            where = slice(bucket.shard_offset, bucket.shard_offset + bucket.nbytes)
            flat = torch.frombuffer(self.slots[bucket.server][self.version % 2][where], dtype=torch.float32)
            for piece in bucket.pieces:
                part = flat[piece.offset // 4 : piece.offset // 4 + piece.elements]
                found[piece.parameter][piece.first : piece.first + piece.elements] = part
        return found

    def save(self, folder: Path) -> list[str]:
        names = [f"shard-{index}" for index in range(len(self.stores))]
        for name, store in zip(names, self.stores, strict=True):
            write_tensors(folder / name, store.snapshot(self.version), {})
        return names

    def restore(self, folder: Path, names: list[str]) -> None:
        for store in self.stores:
            store.restore(folder, names, self.version % 2)


OPTIMIZERS = {
    "SGD": '{"lr": 0.1, "momentum": 0.9, "nesterov": true}',
    "Adam": '{"lr": 0.1, "betas": [0.9, 0.999]}',
    "RMSprop": '{"lr": 0.1, "momentum": 0.9}',
    "SGD fused": '{"lr": 0.1, "momentum": 0.9, "nesterov": true, "fused": true}',
    "Adam fused": '{"lr": 0.1, "fused": true}',
}


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_restored_shard_goes_on_with_the_same_bits(
    tmp_path: Path, kind: str, servers: int, steps: int, wire: str
) -> None:
    saved = Servers(2, kind, wire=wire)
    for _ in range(steps):
        saved.apply()
    names = saved.save(tmp_path)
    again = Servers(servers, kind, start=saved.version, wire=wire)
    again.restore(tmp_path, names)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(saved.values(), again.values(), strict=True))
        saved.apply()
        again.apply()


def test_later_updates_do_not_touch_a_snapshot(tmp_path: Path) -> None:
    saved = Servers(1, "SGD")
    for _ in range(3):
        saved.apply()
    before = saved.stores[0].snapshot(saved.version)
    copies = [bytes(tensor.data) for tensor in before]
    for _ in range(3):
        saved.apply()
    assert [bytes(tensor.data) for tensor in before] == copies


def test_a_checkpoint_is_32_bit_whatever_the_wire(tmp_path: Path) -> None:
    saved = Servers(1, "SGD", wire="float16")
    for _ in range(3):
        saved.apply()
    assert {tensor.dtype for tensor in saved.stores[0].snapshot(saved.version)} == {"F32"}
    exact = Servers(1, "SGD")
    for _ in range(3):
        exact.apply()
    assert any(not torch.equal(a, b) for a, b in zip(saved.values(), exact.values(), strict=True))


@pytest.mark.parametrize(("before", "after"), [("Adam", "Adam fused"), ("Adam fused", "Adam")])
def test_a_fused_optimizer_goes_on_from_one_that_is_not_and_back(tmp_path: Path, before: str, after: str) -> None:
    saved = Servers(1, before)
    for _ in range(3):
        saved.apply()
    again = Servers(1, after, start=saved.version)
    again.restore(tmp_path, saved.save(tmp_path))
    for _ in range(3):
        saved.apply()
        again.apply()
    for one, other in zip(saved.values(), again.values(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_shard_that_lacks_a_part_is_not_restored(tmp_path: Path) -> None:
    saved = Servers(2, "SGD")
    saved.apply()
    names = saved.save(tmp_path)
    with pytest.raises(ValueError, match="elements of"):
        Servers(1, "SGD", start=0).restore(tmp_path, names[:1])
    (tmp_path / names[0]).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read as a shard"):
        Servers(1, "SGD", start=0).restore(tmp_path, names)
