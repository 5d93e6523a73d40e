"""Several threads that process the pieces of a bucket together: the store's own, and helpers.

If every core is busy, a helper uses its share of them for work that would be done anyway. If workers wait for the last
update of a step, it uses a core that would be idle.
"""

from __future__ import annotations

import threading
from collections import deque
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
_OF_WORKERS = 8
"""One core in eight is left to the workers of the host, if it has that many: they compute while a server updates."""
_ENOUGH_HELPERS = 3
"""So many helpers can spare the caller: it brings the next bucket instead, so that none of them waits for it."""
PATIENCE: Final = 600.0
"""Seconds after which a helper that has not finished its piece is an error; a piece takes less than a
millisecond, but this process may be stopped for a while."""

Work = Callable[[int, int], None]
"""Called with the number of a piece and of the thread that processes it, from 0 on."""
Finished = Callable[[Exception | None], None]
"""Called once all pieces are processed, by the thread that processed the last one, with an error of any of them."""


def fitting_helpers(cluster: ClusterSpec) -> int:
    """The number of helpers for this process's server: the servers of a host share what its workers leave.

    None if torch splits each operation among its own threads.
    """
    if torch.get_num_threads() > 1:
        return 0
    cores = int(usable_cores(cgroup_folders()))
    left = max(cores - cluster.beside_own_task(Role.WORKER), cores - cores // _OF_WORKERS)
    return max(1, min(left // cluster.beside_own_task(Role.SERVER), MOST_THREADS)) - 1


def use_own_threads() -> None:
    """In a process that only serves: let ``PiecePool`` use its cores, and torch none besides.

    torchrun gives each process one thread (``OMP_NUM_THREADS=1``), other launchers one per core of the host; neither
    is what belongs to a server. Threads of torch, besides, keep spinning after their work, on cores that workers need.
    """
    torch.set_num_threads(1)


class _Pieces:
    """Pieces, each of which is processed by the thread that takes it."""

    def __init__(self, pieces: int, work: Work, finished: Finished) -> None:
        self.total = pieces
        self._next = count()  # each number is handed out only once
        self._processed = count(1)
        self._error: Exception | None = None
        self._work = work
        self._finished = finished

    def work_off(self, thread: int) -> None:
        """One thread's part: pieces until there are no more."""
        while (piece := next(self._next)) < self.total:
            try:
                self._work(piece, thread)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the pieces
                self._error = error
            if next(self._processed) == self.total:
                self._finished(self._error)


class PiecePool:
    """``helpers``: the number of threads besides one, which is the caller's if they are few. They start with their
    first work.

    Called by one thread. Work that was begun is finished in the background while that thread brings more: threads that
    are through with one bucket go on with the next, instead of waiting for the last of them. A caller that does not
    help brings one bucket ahead, and no more: what is brought first may not be what is needed first.
    """

    def __init__(self, helpers: int) -> None:
        self.size = 1 + helpers
        self._caller_helps = helpers < _ENOUGH_HELPERS
        self._orders: SimpleQueue[_Pieces | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._rooms: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._begun: deque[threading.Lock] = deque()

    def begin(self, pieces: int, work: Work, finished: Finished) -> None:
        """Process all pieces. Returns before they are processed, perhaps before they are taken; of a caller that does
        not help, once all that it brought before is processed."""
        under_way = threading.Lock()
        under_way.acquire()
        self._begun.append(under_way)
        while self._begun and not self._begun[0].locked():
            self._begun.popleft()

        def last(error: Exception | None) -> None:
            try:
                finished(error)
            finally:
                under_way.release()

        if not pieces:
            last(None)
            return
        heap = _Pieces(pieces, work, last)
        own = int(self._caller_helps)
        called = min(self.size, pieces) - own
        self._start(called)
        for _ in range(called):
            self._orders.put(heap)
        if self._caller_helps:
            heap.work_off(0)
        else:
            self._wait(1)

    def work_off(self, pieces: int, work: Work) -> None:
        """Process all pieces, and wait for them; an error is raised once no thread is working any more."""
        errors: list[Exception | None] = []
        self.begin(pieces, work, errors.append)
        self.finish()
        if errors[0] is not None:
            raise errors[0]

    def finish(self) -> None:
        """Wait until everything that was begun is processed. Woken once for each: whoever waits more often takes the
        interpreter from those who still work."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Until at most so many are under way."""
        while len(self._begun) > most:
            under_way = self._begun.popleft()
            if not under_way.acquire(timeout=PATIENCE):
                raise TimeoutError(f"a thread of the store did not finish its piece within {PATIENCE:g} s")

    def room(self, thread: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of this thread alone, which stays in its core's cache; its next call gives the same."""
        known = self._rooms.get((thread, dtype))
        if known is None or known.numel() < elements:
            known = self._rooms[thread, dtype] = torch.empty(elements, dtype=dtype)
        return known[:elements]

    @property
    def room_bytes(self) -> int:
        """Of all threads together."""
        return sum(room.nbytes for room in list(self._rooms.values()))

    def close(self) -> None:
        """End the helpers."""
        for _ in self._helpers:
            self._orders.put(None)
        for helper in self._helpers:
            helper.join(PATIENCE)
        self._helpers.clear()

    def _start(self, needed: int) -> None:
        while len(self._helpers) < needed:
            number = len(self._helpers) + int(self._caller_helps)
            helper = threading.Thread(target=self._help, args=(number,), name=f"store helper {number}", daemon=True)
            self._helpers.append(helper)
            helper.start()

    def _help(self, number: int) -> None:
        while (heap := self._orders.get()) is not None:
            heap.work_off(number)
