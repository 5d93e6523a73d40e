"""A worker's side of the twins, with what it prints, on memory that stands in for a GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from helpers.fake_gpu import FakeGpu, FakeGpuMemory
from lockstep.protocol.core.ids import ClusterShape, worker
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import make_plan
from lockstep.training.gpu.server_twins import ServerTwins
from lockstep.training.gpu.shared_events import Table, table_at
from lockstep.training.gpu.twin_places import room_for_tables
from lockstep.training.gpu.worker_twins import WorkerTwins

PLAN = make_plan(tuple(ParameterEntry(f"p{i}", 300_000, "float32", 0) for i in range(3)), 1, 1 << 20)
ROOM = PLAN.shard_room(0)
TABLES = room_for_tables(PLAN)


class Pair:
    """Worker 1 of two, and the server."""

    def __init__(self, there: FakeGpu | None = None) -> None:
        here = FakeGpu()
        self.said: list[str] = []
        self.slots = [memoryview(bytearray(ROOM + TABLES)) for _ in range(2)]
        self.gradients = memoryview(bytearray(PLAN.arena_bytes + TABLES))
        self.server_memory = FakeGpuMemory(there or here, process=1)
        self.worker_memory = FakeGpuMemory(here, process=2)
        self.server = ServerTwins(self.server_memory, PLAN, 0, self.slots)
        cluster = SimpleNamespace(shape=ClusterShape(workers=2, servers=1))
        node: Any = SimpleNamespace(task=worker(1), config=SimpleNamespace(cluster=cluster), tell_path=self.said.append)
        self.worker = WorkerTwins(node, PLAN, self.worker_memory, self.gradients)

    def send(self) -> bool:
        """A gradient; returns whether the server reads it on the GPU."""
        return self.server.find(0, self.gradients[: PLAN.buckets[0].nbytes]) is not None


def test_a_worker_says_once_that_nothing_crosses_host_memory() -> None:
    pair = Pair()
    assert not pair.worker.is_read_by(0)
    assert pair.send()
    assert not pair.worker.is_read_by(0)  # it has not seen the server's table yet
    for slot in pair.slots:
        assert pair.worker.twin_of(slot[:10]) is None
        assert pair.worker.open(0, slot[:10])
        assert pair.worker.twin_of(slot[10:20]) is not None
    assert pair.worker.is_read_by(0)
    assert pair.worker.is_read_by(0)
    assert pair.said == ["worker 1 and ps 0 are on one GPU, and their tensors stay in its memory"]
    pair.worker.close()
    assert pair.worker_memory.opened == pair.worker_memory.own == []


def test_a_server_that_is_not_on_this_gpu_needs_no_line() -> None:
    pair = Pair(FakeGpu(b"H" * 16))
    assert not pair.send()
    assert not pair.worker.open(0, pair.slots[0])
    assert pair.said == []  # it offers nothing, and need not be on a GPU at all


def test_a_server_on_this_gpu_that_offers_nothing_is_named() -> None:
    pair = Pair()
    handles = tuple(bytes(64) for _ in PLAN.buckets)
    Table(pair.worker_memory.gpu, 1, 0, handles).write(pair.slots[0], table_at(ROOM))
    assert not pair.worker.open(0, pair.slots[0])
    assert pair.said == ["worker 1 and ps 0: their tensors cross host memory: the server could not share its GPU's"]


def test_what_cuda_says_to_the_worker_is_printed() -> None:
    pair = Pair()
    assert pair.send()
    pair.worker_memory.fails = "operation not supported"
    assert not pair.worker.open(0, pair.slots[0])
    assert not pair.worker.is_read_by(0)
    assert pair.said == ["worker 1 and ps 0: their tensors cross host memory: operation not supported"]


def test_slots_that_were_lent_before_they_had_twins_stay_filled() -> None:
    pair = Pair()
    assert not pair.worker.open(0, pair.slots[0])
    assert pair.send()
    assert pair.worker.open(0, pair.slots[1])
    assert not pair.worker.is_read_by(0)
    assert pair.server.host_is_read()
