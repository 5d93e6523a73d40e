"""A store whose workers read its versions in twins. These are in host memory here, in ``test_gpu_servers`` on a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from helpers.fake_gpu import FakeGpu, FakeGpuMemory
from helpers.one_bucket import ENTRIES, KINDS, LR, PLAN, flat_of, in_one_process, places
from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, worker
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry
from lockstep.runtime.task.store import Done
from lockstep.training.gpu.gpu_stream import GpuStream, TakenGradients
from lockstep.training.gpu.gpu_twins import OpenedTwins, OwnTwins
from lockstep.training.gpu.pinned_memory import PinnedMemory
from lockstep.training.gpu.server_twins import ServerTwins
from lockstep.training.gpu.twin_places import room_for_tables, twin_at
from lockstep.training.server.shard_file import VALUE, PieceName
from lockstep.training.server.shard_store import TorchShardStore

ROOM, BUCKET = PLAN.shard_room(0), PLAN.buckets[0]


class HostLane(GpuStream):
    """Everything is computed at once, by the CPU."""

    def __init__(self, slots: Sequence[memoryview], gpu: FakeGpu) -> None:
        self.memory = FakeGpuMemory(gpu)
        self.twins = ServerTwins(self.memory, PLAN, 0, slots)
        self.pinned = PinnedMemory()

    def take(self, bucket: int, gradients: Sequence[memoryview]) -> TakenGradients:
        assert self.twins is not None
        return TakenGradients(tuple(self.twins.find(bucket, one) for one in gradients), readers_wait=True)

    def hand_on(self, bucket: int, done: Done, *, at_once: bool) -> None:
        assert (bucket, at_once) == (0, True)
        done(None)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        pass


class Exchange:
    """A server's store and its workers, who have their gradients in twins only."""

    def __init__(self, kind: str, workers: int = 2, slots: int = 2) -> None:
        gpu = FakeGpu()
        room = room_for_tables(PLAN)
        self.slots = [memoryview(bytearray(ROOM + room)) for _ in range(slots)]
        self.lane = HostLane(self.slots, gpu)
        self.store = TorchShardStore()
        self.store._lane = self.lane
        layout = Layout(PLAN.hash, PLAN.bucket_bytes, ENTRIES, (OptimizerEntry(kind, KINDS[kind]),))
        self.store._slots = self.slots
        with self.store._on_device():
            self.store._held[0] = self.store._hold(BUCKET, layout.optimizers[0], self.slots, BUCKET.nbytes)
        self.store._names = tuple(entry.name for entry in ENTRIES)
        self.regions = [memoryview(bytearray(PLAN.arena_bytes + room)) for _ in range(workers)]
        self.memories = [FakeGpuMemory(gpu, 100 + index) for index in range(workers)]
        self.leaving: list[OwnTwins] = []
        self.readers = [OpenedTwins(memory) for memory in self.memories]
        for index, (memory, region) in enumerate(zip(self.memories, self.regions, strict=True)):
            own = OwnTwins(memory, [region], PLAN.arena_bytes, twin_at(PLAN.arena_bytes, PLAN))
            own.offer(index, workers)
            self.leaving.append(own)
        self.version = INITIAL_STEP

    def apply(self, flats: list[Tensor], without: tuple[int, ...] = (), *, values: bool = False) -> None:
        lent = []
        where = slice(BUCKET.arena_offset, BUCKET.arena_offset + BUCKET.nbytes)
        for flat, own, region in zip(flats, self.leaving, self.regions, strict=False):
            own.tensors[0][where].copy_(flat.view(torch.uint8))
            if self.version == INITIAL_STEP:
                region[where] = flat.view(torch.uint8).numpy().data
            lent.append(region[where])
        tasks = (CHIEF, worker(1))[: len(flats)]
        rates = (GroupRates(("lr",), (LR,)),)
        slots = (self._slot(self.version), self._slot(self.version + 1))
        effect = Apply(
            self.version, 0, tasks, (1,) * len(tasks), len(tasks), rates, *slots, without=without, values=values
        )
        told = threading.Event()
        self.store.begin(effect, lent, lambda error: told.set() if error is None else None)
        assert told.is_set()
        self.version += 1

    def _slot(self, version: int) -> int:
        return version % len(self.slots)

    def read(self, index: int) -> Tensor:
        """The newest version, as this worker reads it."""
        lookup, _ = self.readers[index].open(self.slots[self._slot(self.version)], twin_at(ROOM, PLAN), ROOM)
        assert lookup.twin is not None
        self.leaving[index].tell(0, opened=True)
        return lookup.twin.tensor[BUCKET.shard_offset :][: BUCKET.nbytes].view(torch.float32)

    def in_host(self) -> Tensor:
        slot = torch.frombuffer(self.slots[self._slot(self.version)], dtype=torch.uint8)
        return slot[BUCKET.shard_offset :][: BUCKET.nbytes].view(torch.float32)


@pytest.mark.parametrize("slots", [2, 1])
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop", "SGD"])
def test_versions_in_twins_are_those_of_one_process(kind: str, slots: int) -> None:
    missing = {1: (0,), 3: (1, 2)}
    exchange = Exchange(kind, slots=slots)
    exchange.apply([flat_of(INITIAL_STEP, 0)])
    for step in range(5):
        versions = [exchange.read(index).clone() for index in range(2)]
        assert torch.equal(*versions)
        # The second worker has read its first version now; from then on nobody reads host memory.
        assert torch.equal(exchange.in_host(), versions[0]) == (step == 0)
        exchange.apply([flat_of(step, 0), flat_of(step, 1)], missing.get(step, ()))
    made = exchange.read(0)
    for where, theirs in zip(places(), in_one_process(kind, 5, missing), strict=True):
        torch.testing.assert_close(made[where], theirs, rtol=1e-5, atol=1e-6)
    saved = {one.name: one.data for one in exchange.store.snapshot(exchange.version)}
    for entry, where in zip(ENTRIES, places(), strict=True):
        written = saved[str(PieceName(VALUE, 0, "", entry.name))]
        assert torch.equal(torch.frombuffer(written, dtype=torch.float32), made[where])


def test_a_version_that_is_still_lent_is_not_touched_by_the_next() -> None:
    exchange = Exchange("AdamW")
    exchange.apply([flat_of(INITIAL_STEP, 0)])
    lent = exchange.read(1)
    before = lent.clone()
    exchange.apply([flat_of(0, 0)])
    assert torch.equal(lent, before)
    assert not torch.equal(exchange.read(0), before)


def test_values_of_the_chief_and_steps_without_gradients_reach_the_twins() -> None:
    exchange = Exchange("AdamW")
    exchange.apply([flat_of(INITIAL_STEP, 0)])
    for index in range(2):
        exchange.read(index)
    exchange.apply([flat_of(0, 0), flat_of(0, 1)])
    exchange.apply([flat_of(7, 0)], values=True)
    assert torch.equal(exchange.read(0), flat_of(7, 0))
    exchange.apply([])
    assert torch.equal(exchange.read(0), flat_of(7, 0))


def test_the_memory_before_the_twins_is_given_back() -> None:
    exchange = Exchange("AdamW")
    former = exchange.store._held[0].on_gpu[0].data_ptr()
    exchange.apply([flat_of(INITIAL_STEP, 0)])
    exchange.apply([flat_of(0, 0), flat_of(0, 1)])
    held = exchange.store._held[0]
    assert former not in [one.data_ptr() for one in (*held.on_gpu, held.optimizer.parts[0].parameter)]
    assert exchange.store.memory()["parameters on the GPU"] == 2 * BUCKET.nbytes
