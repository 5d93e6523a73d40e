"""The work of a server's store thread: in order of arrival, except for updates.

Of updates that wait next to each other, the one with the highest bucket goes first. Buckets are numbered from the last
layer to the first, and the next forward pass of every worker needs the first layer first. Those that no worker waits
for come after them.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable

from lockstep.protocol.core.ids import BucketId

Work = Callable[[], None]
_Updates = list[tuple[bool, int, int, Work]]


class StoreQueue:
    """Filled by the loop, emptied by one thread."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._waiting: deque[Work | _Updates | None] = deque()
        self._count = 0
        self._added = 0

    def put(self, work: Work | None) -> None:
        """Add work after everything that waits now. None ends the thread."""
        with self._wake:
            self._waiting.append(work)
            self._count += 1
            self._wake.notify()

    def put_update(self, bucket: BucketId, work: Work, *, later: bool = False) -> None:
        """Add an update before other updates of lower buckets that came since the last ``put``; ``later``: after all
        that are not."""
        with self._wake:
            if not self._waiting or not isinstance(self._waiting[-1], list):
                self._waiting.append([])
            updates = self._waiting[-1]
            assert isinstance(updates, list)
            heapq.heappush(updates, (later, -bucket, self._added, work))
            self._added += 1
            self._count += 1
            self._wake.notify()

    def get(self) -> Work | None:
        """The next piece of work; blocks until there is one."""
        with self._wake:
            while not self._waiting:
                self._wake.wait()
            self._count -= 1
            first = self._waiting[0]
            if not isinstance(first, list):
                return self._waiting.popleft()  # type: ignore[return-value]  # as was just checked
            work = heapq.heappop(first)[3]
            if not first:
                self._waiting.popleft()
            return work

    def qsize(self) -> int:
        """How many pieces of work are waiting."""
        return self._count
