"""The table of events behind a region. The events themselves need a GPU: ``tests/library/test_gpu.py``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.gpu.shared_events import Table, is_let_read, let_read, read_table, spare_bytes, table_at


@given(st.integers(0, 5000), st.lists(st.binary(min_size=64, max_size=64), max_size=20), st.integers(0, 63))
def test_a_table_is_read_as_it_was_written(nbytes: int, handles: list[bytes], owner: int) -> None:
    memory = memoryview(bytearray(nbytes + spare_bytes(len(handles))))
    table = Table(b"g" * 16, 77, owner, tuple(handles))
    table.write(memory, table_at(nbytes))
    assert read_table(memory, table_at(nbytes), len(handles)) == table
    assert bytes(memory[:nbytes]) == bytes(nbytes)
    assert read_table(memory, table_at(nbytes), len(handles) + 1) is None


def test_memory_without_a_table_has_none() -> None:
    assert read_table(memoryview(bytes(100)), 64, 3) is None
    assert read_table(memoryview(bytes(10_000)), 64, 3) is None


@pytest.mark.parametrize("peer", [0, 5, 63])
def test_a_reader_is_let_in_by_itself(peer: int) -> None:
    memory = memoryview(bytearray(spare_bytes(1)))
    Table(b"g" * 16, 1, 0, (b"h" * 64,)).write(memory, 0)
    assert not is_let_read(memory, 0, peer)
    let_read(memory, 0, peer)
    assert [other for other in range(70) if is_let_read(memory, 0, other)] == [peer]
