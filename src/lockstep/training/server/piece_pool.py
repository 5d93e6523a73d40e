"""Several threads that process the pieces of a bucket together: the store's own, and helpers.

If every core is busy, a helper uses its share of them for work that would be done anyway. If workers wait for the last
update of a step, it uses a core that would be idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from typing import Final

import torch

from lockstep.protocol.core.ids import Role
from lockstep.runtime.cores import cgroup_folders, usable_cores
from lockstep.runtime.startup.cluster import ClusterSpec

MOST_THREADS: Final = 16
"""For a server's updates; they are memory-bound, and more cores than these saturate any host's memory."""
PATIENCE: Final = 600.0
"""Seconds after which a helper that has not finished its piece is an error; a piece takes less than a
millisecond, but this process may be stopped for a while."""

Work = Callable[[int, int], None]
"""Called with the number of a piece and of the thread that processes it: 0 is the caller's, and all are below the
number of pieces, however many threads there are."""


def fitting_helpers(cluster: ClusterSpec) -> int:
    """The number of helpers for this process's server: the servers of a host share its cores.

    None if torch splits each operation among its own threads.
    """
    if torch.get_num_threads() > 1:
        return 0
    share = int(usable_cores(cgroup_folders())) // cluster.beside_own_task(Role.SERVER)
    return max(1, min(share, MOST_THREADS)) - 1


def use_own_threads() -> None:
    """In a process that only serves: let ``PiecePool`` use its cores, and torch none besides.

    torchrun gives each process one thread (``OMP_NUM_THREADS=1``), other launchers one per core of the host; neither
    is what belongs to a server. Threads of torch, besides, keep spinning after their work, on cores that workers need.
    """
    torch.set_num_threads(1)


class _Pieces:
    """Pieces, each of which is processed by the thread that takes it."""

    def __init__(self, pieces: int, work: Work) -> None:
        self.total = pieces
        self._next = count()  # each number is handed out only once
        self._finished = count(1)
        self._places = count(1)
        self._end = threading.Lock()
        self._end.acquire()
        self.error: Exception | None = None
        self._work = work

    def join(self) -> int:
        """The number of a further thread in this work, which is not its number among all helpers."""
        return next(self._places)

    def work_off(self, thread: int) -> None:
        """One thread's part: pieces until there are no more. The caller raises any error."""
        while (piece := next(self._next)) < self.total:
            try:
                self._work(piece, thread)
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self.error = error
            if next(self._finished) == self.total:
                self._end.release()

    def wait(self) -> bool:
        """Until all are processed; whether they were in time. Woken once: each time it would take the interpreter
        from those who still work."""
        return self._end.acquire(timeout=PATIENCE)


class PiecePool:
    """``helpers``: the number of threads besides the caller's. They start with their first work."""

    def __init__(self, helpers: int) -> None:
        self.size = 1 + helpers
        self._orders: SimpleQueue[_Pieces | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def work_off(self, pieces: int, work: Work) -> None:
        """Process all pieces; an error is raised once no thread is working any more."""
        if not pieces:
            return
        heap = _Pieces(pieces, work)
        called = min(self.size - 1, pieces - 1)
        self._start(called)
        for _ in range(called):
            self._orders.put(heap)
        heap.work_off(0)
        if not heap.wait():
            raise TimeoutError(f"a thread of the store did not finish its piece within {PATIENCE:g} s")
        if heap.error is not None:
            raise heap.error

    def close(self) -> None:
        """End the helpers."""
        for _ in self._helpers:
            self._orders.put(None)
        for helper in self._helpers:
            helper.join(PATIENCE)
        self._helpers.clear()

    def _start(self, needed: int) -> None:
        while len(self._helpers) < needed:
            number = len(self._helpers) + 1
            helper = threading.Thread(target=self._help, name=f"store helper {number}", daemon=True)
            self._helpers.append(helper)
            helper.start()

    def _help(self) -> None:
        while (heap := self._orders.get()) is not None:
            heap.work_off(heap.join())
