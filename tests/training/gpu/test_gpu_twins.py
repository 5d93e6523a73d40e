"""Twins of regions, on memory that stands in for a GPU's. With CUDA's: ``tests/library/test_gpu_servers.py``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.fake_gpu import FakeGpu, FakeGpuMemory
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import make_plan
from lockstep.training.gpu.gpu_twins import MOST_TASKS, TWIN_BYTES, OpenedTwins, OwnTwins, TwinTable, read_twin
from lockstep.training.gpu.ipc_memory import HANDLE_BYTES, CannotShareError
from lockstep.training.gpu.server_twins import ServerTwins
from lockstep.training.gpu.shared_events import spare_bytes, table_at
from lockstep.training.gpu.twin_places import room_for_tables, twin_at

PLAN = make_plan(tuple(ParameterEntry(f"p{i}", 300_000, "float32", 0) for i in range(3)), 1, 1 << 20)
AT = twin_at(PLAN.arena_bytes, PLAN)
ROOM = PLAN.shard_room(0)
NUMBERS = st.integers(0, 2**64 - 1)


class Ends:
    """A worker's region of gradients and a server's two slots."""

    def __init__(self, workers: int = 1) -> None:
        self.gpu = FakeGpu()
        self.server_memory = FakeGpuMemory(self.gpu)
        self.worker_memory = [FakeGpuMemory(self.gpu, 100 + index) for index in range(workers)]
        self.slots = [memoryview(bytearray(ROOM + room_for_tables(PLAN))) for _ in range(2)]
        self.regions = [memoryview(bytearray(PLAN.arena_bytes + room_for_tables(PLAN))) for _ in range(workers)]
        self.server = ServerTwins(self.server_memory, PLAN, 0, self.slots)
        self.own: list[OwnTwins] = []
        for index in range(workers):
            twins = OwnTwins(self.worker_memory[index], [self.regions[index]], PLAN.arena_bytes, AT)
            twins.offer(index, workers)
            self.own.append(twins)

    def gradient(self, bucket: int, worker: int = 0) -> memoryview:
        known = PLAN.buckets[bucket]
        return self.regions[worker][known.arena_offset : known.arena_offset + known.nbytes]


def test_a_table_has_room_behind_the_events_and_leaves_them_alone() -> None:
    for nbytes in (0, 1, 63, 64, 65, 1000):
        events = table_at(nbytes) + spare_bytes(len(PLAN.buckets)) - 64
        assert twin_at(nbytes, PLAN) >= events
        assert twin_at(nbytes, PLAN) + TWIN_BYTES <= nbytes + room_for_tables(PLAN)


@given(st.integers(0, 2**32 - 1), st.integers(1, MOST_TASKS), st.binary(min_size=64, max_size=64), st.data())
def test_a_table_is_read_as_it_was_written(process: int, of: int, handle: bytes, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, of - 1))
    total = data.draw(st.integers(0, 1 << 44))
    offset = data.draw(st.integers(0, total))
    table = TwinTable(b"g" * 16, process, owner, of, offset, total - offset, total, handle)
    memory = memoryview(bytearray(b"x" * (64 + TWIN_BYTES)))
    table.write(memory, 64)
    assert read_twin(memory, 64) == table
    assert bytes(memory[:64]) == b"x" * 64


@given(NUMBERS, NUMBERS, NUMBERS, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_numbers_that_make_no_sense_are_no_table(offset: int, nbytes: int, total: int, owner: int, of: int) -> None:
    memory = memoryview(bytearray(TWIN_BYTES))
    TwinTable(b"g" * 16, 1, owner, of, offset, nbytes, total, bytes(64)).write(memory, 0)
    found = read_twin(memory, 0)
    assert (found is not None) == (offset + nbytes <= total <= 1 << 44 and owner < of <= MOST_TASKS)


def test_memory_without_a_table_has_no_twin() -> None:
    assert read_twin(memoryview(bytes(10_000)), 64) is None
    assert read_twin(memoryview(bytes(100)), 64) is None
    lookup, is_new = OpenedTwins(FakeGpuMemory(FakeGpu())).open(memoryview(bytearray(10_000)), 64, 1)
    assert (lookup.twin, lookup.owner, lookup.reason, is_new) == (None, None, "", True)


def test_a_gradient_is_read_in_the_twin_and_the_slots_get_twins_in_turn() -> None:
    ends = Ends()
    ends.own[0].tensors[0].copy_(torch.arange(PLAN.arena_bytes) % 251)
    assert ends.server.slots() == ()
    for bucket in PLAN.buckets:
        found = ends.server.find(bucket.id, ends.gradient(bucket.id))
        assert found is not None
        where = slice(bucket.arena_offset, bucket.arena_offset + bucket.nbytes)
        assert torch.equal(found, ends.own[0].tensors[0][where])
    assert len(ends.server_memory.opened) == 1
    assert [len(twin) for twin in ends.server.slots()] == [ROOM, ROOM]
    assert len(ends.server_memory.own) == 1


def test_the_host_is_read_until_every_worker_has_opened_the_servers_twins() -> None:
    ends = Ends(workers=2)
    for worker in range(2):
        assert ends.server.find(0, ends.gradient(0, worker)) is not None
    assert ends.server.host_is_read()
    for worker in range(2):
        theirs = OpenedTwins(ends.worker_memory[worker])
        for number, slot in enumerate(ends.slots):
            lookup, _ = theirs.open(slot, twin_at(ROOM, PLAN), ROOM)
            assert lookup.twin is not None
            assert lookup.twin.has_opened(worker)
            ends.server.slots()[number].fill_(10 * worker + number)
            assert int(lookup.twin.tensor[-1]) == 10 * worker + number
        assert len(ends.worker_memory[worker].opened) == 1  # both slots are in one memory
        assert ends.server.host_is_read()
        ends.own[worker].tell(0, opened=True)
    assert not ends.server.host_is_read()


def test_twins_of_former_lives_are_closed_and_those_that_still_lend_are_opened_again() -> None:
    ends = Ends()
    assert ends.server.find(0, ends.gradient(0)) is not None
    ends.own[0].tell(0, opened=True)
    assert not ends.server.host_is_read()
    ends.server.forget()
    assert ends.server_memory.opened == []
    assert ends.server.host_is_read()
    assert ends.server.find(0, ends.gradient(0)) is not None
    assert not ends.server.host_is_read()


def test_a_worker_that_relies_on_its_twin_is_not_read_in_host_memory() -> None:
    """It no longer fills its region: what is there is old."""
    ends = Ends()
    assert ends.server.find(0, ends.gradient(0)) is not None
    ends.server.forget()
    ends.server_memory.fails = "out of memory"
    with pytest.raises(CannotShareError, match="out of memory"):
        ends.server.find(0, ends.gradient(0))


def test_memory_that_a_worker_has_open_is_left_to_the_end_of_the_process() -> None:
    for is_open in (False, True):
        ends = Ends()
        ends.server.find(0, ends.gradient(0))
        if is_open:
            ends.own[0].tell(0, opened=True)
        ends.server.close()
        assert ends.server_memory.opened == []
        assert len(ends.server_memory.own) == is_open
        ends.own[0].close()
        assert ends.worker_memory[0].own == []


def test_a_server_that_cannot_open_a_twin_says_so_and_reads_the_host() -> None:
    ends = Ends(workers=2)
    ends.worker_memory[1].free(ends.worker_memory[1].own[0])  # its handle is nobody's now
    assert ends.server.find(0, ends.gradient(0, 1)) is None
    assert ends.server.slots() == ()  # nobody would read them
    assert ends.server.find(0, ends.gradient(0, 0)) is not None
    ends.server.forget()
    for worker in range(2):
        ends.server.find(0, ends.gradient(0, worker))
        ends.own[worker].tell(0, opened=True)
    assert ends.server.host_is_read()
    lookup, _ = OpenedTwins(ends.worker_memory[1]).open(ends.slots[0], twin_at(ROOM, PLAN), ROOM)
    assert lookup.twin is not None
    assert (lookup.twin.has_opened(0), lookup.twin.has_refused(0)) == (True, False)
    assert (lookup.twin.has_opened(1), lookup.twin.has_refused(1)) == (False, True)


def test_a_server_without_memory_for_twins_reads_the_host() -> None:
    ends = Ends()
    ends.server_memory.lacks_memory = True
    assert ends.server.find(0, ends.gradient(0)) is None
    assert ends.server.slots() == ()
    assert ends.server.host_is_read()


@pytest.mark.parametrize(
    ("process", "uuid", "needed", "reason"),
    [
        (1, b"G" * 16, 10, "both are in one process"),
        (2, b"H" * 16, 10, "they are on different GPUs"),
        (2, b"G" * 16, 11, "10 bytes are offered, 11 are needed"),
        (2, b"G" * 16, 10, "invalid resource handle"),
    ],
)
def test_why_a_twin_is_not_opened(process: int, uuid: bytes, needed: int, reason: str) -> None:
    memory = memoryview(bytearray(TWIN_BYTES))
    TwinTable(b"G" * 16, process, 3, 4, 0, 10, 10, bytes(HANDLE_BYTES)).write(memory, 0)
    lookup, is_new = OpenedTwins(FakeGpuMemory(FakeGpu(uuid))).open(memory, 0, needed)
    assert (lookup.twin, lookup.owner, lookup.reason, is_new) == (None, 3, reason, True)


def test_an_allocation_without_a_handle_is_freed() -> None:
    memory = FakeGpuMemory(FakeGpu())
    allocate = memory.allocate

    def then_fail(nbytes: int) -> torch.Tensor:
        made = allocate(nbytes)
        memory.fails = "operation not supported"
        return made

    memory.allocate = then_fail  # type: ignore[method-assign]
    with pytest.raises(CannotShareError, match="operation not supported"):
        OwnTwins(memory, [memoryview(bytearray(1000))], 100, 200)
    assert memory.own == []
