"""Threads that work off pieces together: each piece once, errors told, nobody left."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch

from lockstep.protocol.core.ids import Role, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.training.server.piece_pool import PiecePool, fitting_helpers

SECONDS = 20.0
HERE = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")


@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_every_piece_is_done_once(pieces: int, helpers: int) -> None:
    done: list[int] = []
    with contextlib.closing(PiecePool(helpers)) as crew:
        for _ in range(20):
            done.clear()
            crew.work_off(pieces, lambda piece, _thread: done.append(piece))
            assert sorted(done) == list(range(pieces))


def test_helpers_work_at_the_same_time_and_know_their_numbers() -> None:
    together, seen = threading.Barrier(3), set()

    def work(_piece: int, thread: int) -> None:
        together.wait(SECONDS)
        seen.add((thread, threading.current_thread().name))

    with contextlib.closing(PiecePool(2)) as crew:
        crew.work_off(3, work)
    own = threading.current_thread().name
    assert {number for number, _ in seen} == {0, 1, 2}
    assert {name for _, name in seen} == {own, "store helper 1", "store helper 2"}
    assert (0, own) in seen


def test_threads_go_on_with_what_was_begun_next_and_each_keeps_its_own_room() -> None:
    """The caller begins a second work while a helper is still at the first one."""
    begun, together, done = threading.Event(), threading.Barrier(2), []
    rooms: dict[str, set[int]] = {}

    def note(thread: int) -> None:
        rooms.setdefault(threading.current_thread().name, set()).add(crew.room(thread, 4, torch.float32).data_ptr())

    def held_up(_piece: int, thread: int) -> None:
        together.wait(SECONDS)  # both threads have a piece
        note(thread)
        assert thread == 0 or begun.wait(SECONDS)

    with contextlib.closing(PiecePool(1)) as crew:
        crew.begin(2, held_up, lambda _error: done.append("first"))
        crew.begin(1, lambda _piece, thread: note(thread), lambda _error: done.append("second"))
        assert done == ["second"]
        begun.set()
        crew.finish()
    assert done == ["second", "first"]
    assert sorted(map(len, rooms.values())) == [1, 1]
    assert len(set.union(*rooms.values())) == 2


def test_many_helpers_leave_the_caller_free_to_bring_the_next_and_no_more() -> None:
    """Otherwise they would wait for its piece before they get the next bucket, and an urgent one for all before it."""
    next_is_here, done, threads = threading.Event(), [], set()

    def note(thread: int) -> None:
        threads.add((thread, threading.current_thread().name))

    def held_up(_piece: int, thread: int) -> None:
        assert next_is_here.wait(SECONDS)
        note(thread)

    def found(_piece: int, thread: int) -> None:
        next_is_here.set()
        note(thread)

    with contextlib.closing(PiecePool(3)) as crew:
        crew.begin(2, held_up, lambda _error: done.append("first"))
        assert done == []
        crew.begin(4, found, lambda _error: done.append("second"))
        assert "first" in done, "a third one may be more urgent than whatever would wait here"
        crew.finish()
    assert sorted(done) == ["first", "second"]
    assert threads <= {(number, f"store helper {number}") for number in range(4)}


@pytest.mark.parametrize("where", ["in a helper", "in the caller"])
def test_an_error_is_raised_and_the_crew_goes_on(where: str) -> None:
    together = threading.Barrier(2)

    def work(_piece: int, thread: int) -> None:
        together.wait(SECONDS)
        if (thread > 0) is (where == "in a helper"):
            raise ValueError("no such piece")

    with contextlib.closing(PiecePool(1)) as crew:
        with pytest.raises(ValueError, match="no such piece"):
            crew.work_off(2, work)
        done: list[int] = []
        crew.work_off(4, lambda piece, _thread: done.append(piece))
        assert sorted(done) == [0, 1, 2, 3]


def test_threads_start_with_work_and_end_with_the_crew() -> None:
    before = threading.active_count()
    crew = PiecePool(2)
    crew.work_off(1, lambda _piece, _thread: None)
    assert threading.active_count() == before, "one piece needs no helper"
    crew.work_off(8, lambda _piece, _thread: None)
    assert threading.active_count() == before + 2
    crew.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("cores", "servers", "threads", "expected"),
    [
        (1, 1, 1, 0),
        (2, 1, 1, 1),
        (2, 2, 1, 0),
        (2, 3, 1, 0),
        (8, 2, 1, 2),
        (16, 1, 1, 13),
        (64, 1, 1, 15),
        (64, 1, 8, 0),
    ],
)
def test_servers_of_a_host_share_the_cores_that_its_workers_leave(
    monkeypatch: pytest.MonkeyPatch, cores: int, servers: int, threads: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cluster = ClusterSpec(
        ps_hosts=(*HERE[:servers], "10.0.0.9:1"), worker_hosts=HERE[servers:], task=TaskId(Role.SERVER, 0)
    )
    assert fitting_helpers(cluster) == expected
