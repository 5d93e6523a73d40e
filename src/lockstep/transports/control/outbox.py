"""The queue between the senders and the gRPC thread that writes; used by both ends of a link.

Messages that wait together go out together: each write to a gRPC stream costs a hand-over between threads at both
ends, which costs many times more than a small message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Final

MAX_WAITING_MESSAGES: Final = 20_000
MAX_WAITING_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 64 << 10


class OutboxFullError(Exception):
    """The other side does not read; the text says how much is waiting for it."""


class Outbox:
    """Bytes that go out in order. ``put`` never blocks; iterating blocks until there is something or the end."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._messages = 0
        self._bytes = 0
        self._closed = False
        self._aborted = False

    def put(self, data: bytes) -> bool:
        """Queue ``data``; False if the outbox is closed, ``OutboxFullError`` if too much is waiting."""
        with self._lock:
            if self._closed:
                return False
            if self._messages >= MAX_WAITING_MESSAGES or self._bytes + len(data) > MAX_WAITING_BYTES:
                raise OutboxFullError(f"{self._messages} messages ({self._bytes} bytes) are waiting to be sent")
            self._messages += 1
            self._bytes += len(data)
            self._queue.put(data)
            return True

    def close(self) -> None:
        """Waiting messages still go out, then the stream ends."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def abort(self) -> None:
        """End the stream now and drop what is waiting."""
        with self._lock:
            self._closed = True
            self._aborted = True
            self._queue.put(None)

    def batches(self) -> Iterator[list[bytes]]:
        """Waiting messages, in order, as lists of up to about ``BATCH_BYTES``. Ends after ``close`` or ``abort``."""
        open_ended = True
        while open_ended:
            batch, size = [], 0
            data = self._queue.get()
            while data is not None and not self._aborted:
                batch.append(data)
                size += len(data)
                if size >= BATCH_BYTES:
                    break
                try:
                    data = self._queue.get_nowait()
                except Empty:
                    break
            else:
                open_ended = False
            with self._lock:
                self._messages -= len(batch)
                self._bytes -= size
            if batch and not self._aborted:
                yield batch
