"""Pieces of shared memory, mapped side by side."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lockstep.transports.joined_memory import join_pages

PAGE = mmap.PAGESIZE


Shared = Callable[[int], tuple[mmap.mmap, int]]


@pytest.fixture
def shared() -> Iterator[Shared]:
    """Make shared memory of that many pages: a writable mapping, and the address of a second, read-only one."""
    with contextlib.ExitStack() as closing:

        def make(pages: int) -> tuple[mmap.mmap, int]:
            descriptor = os.memfd_create("test")
            os.posix_fallocate(descriptor, 0, pages * PAGE)
            written = closing.enter_context(mmap.mmap(descriptor, pages * PAGE))
            read = closing.enter_context(mmap.mmap(descriptor, pages * PAGE, mmap.MAP_SHARED, mmap.PROT_READ))
            os.close(descriptor)
            return written, int(np.frombuffer(read, np.uint8).ctypes.data)

        yield make


def test_ranges_of_two_mappings_lie_behind_each_other_and_show_later_writes(shared: Shared) -> None:
    (first, at_first), (second, at_second) = shared(3), shared(2)
    joined = join_pages([(at_first + PAGE, 2 * PAGE), (at_second, 100)])
    assert joined is not None
    assert joined.nbytes == 2 * PAGE + 100
    assert joined.readonly
    first[PAGE], first[3 * PAGE - 1], second[0], second[99] = 1, 2, 3, 4
    assert (joined[0], joined[2 * PAGE - 1], joined[2 * PAGE], joined[-1]) == (1, 2, 3, 4)


def test_what_is_no_whole_page_cannot_be_joined(shared: Shared) -> None:
    _, address = shared(4)
    assert join_pages([(address + 64, PAGE), (address, PAGE)]) is None
    assert join_pages([(address, PAGE - 64), (address + PAGE, PAGE)]) is None
    assert join_pages([]) is None


def test_the_second_mapping_ends_with_its_last_view(shared: Shared) -> None:
    _, address = shared(2)
    joined = join_pages([(address, 2 * PAGE)])
    assert joined is not None
    where = int(np.frombuffer(joined, np.uint8).ctypes.data)
    assert f"{where:x}-" in _maps()
    del joined
    assert f"{where:x}-" not in _maps()


def _maps() -> str:
    with open("/proc/self/maps") as maps:
        return maps.read()
