"""The sending half of a stream: transfers wait as descriptors and become chunks only when gRPC asks for one.

gRPC asks for the next frame when it has taken the previous one, so what is in flight toward it never exceeds one chunk
and its own buffers, however much waits here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from lockstep.transports.base import Move


class Bulk(Protocol):
    """A transfer whose bytes go over the stream, in chunks."""

    @property
    def move(self) -> Move: ...

    @property
    def begun(self) -> int:
        """How many bytes have become chunks."""

    @property
    def left(self) -> bool:
        """Whether all bytes have become chunks."""

    def claim(self) -> tuple[int, int]:
        """The next range to send."""

    def pack(self, begin: int, end: int) -> bytes:
        """A claimed range as a frame."""


AnyBulk = TypeVar("AnyBulk", bound=Bulk)


class Sender(Generic[AnyBulk]):
    """Orders frames: urgent frames before bulk, bulk by its urgency and then in the order of the calls."""

    def __init__(self, on_left: Callable[[AnyBulk], None] = lambda _: None) -> None:
        """``on_left``: gRPC has taken the last chunk of a transfer."""
        self._on_left = on_left
        self._wake = threading.Condition()
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[AnyBulk] = deque()
        self._flowing = False
        self._ended = False

    def add(self, transfer: AnyBulk) -> None:
        """Queue a transfer; it moves once ``flow`` has been called."""
        with self._wake:
            place = len(self._bulk)
            while place and _yields(self._bulk[place - 1], transfer):
                place -= 1
            self._bulk.insert(place, transfer)
            self._wake.notify()

    def add_urgent(self, frame: bytes) -> None:
        """Queue a small frame that goes before all bulk."""
        with self._wake:
            if not self._ended:
                self._urgent.append(frame)
                self._wake.notify()

    def flow(self) -> None:
        """The peer has connected: let bulk move."""
        with self._wake:
            self._flowing = True
            self._wake.notify()

    def remove(self, transfer: AnyBulk) -> bool:
        """Take a transfer back; False if its last chunk has left already."""
        with self._wake:
            if transfer not in self._bulk:
                return False
            self._bulk.remove(transfer)
            return True

    def end(self, last: bytes | None = None) -> None:
        """Send urgent frames, then ``last``, then end the stream. Waiting bulk is dropped."""
        with self._wake:
            if self._ended:
                return
            self._ended = True
            self._bulk.clear()
            if last is not None:
                self._urgent.append(last)
            self._wake.notify()

    def frames(self) -> Iterator[bytes]:
        """What the stream sends. Runs on a thread of gRPC, which is this endpoint's sender until the stream ends."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                if self._urgent:
                    frame, claim = self._urgent.popleft(), None
                elif self._ended:
                    return
                else:
                    claim = self._claim()
            if claim is None:
                yield frame
                continue
            transfer, begin, end = claim
            yield transfer.pack(begin, end)  # copies the bytes, outside of every lock
            if transfer.left:
                self._on_left(transfer)

    def _has_work(self) -> bool:
        return bool(self._urgent or self._ended or (self._bulk and self._flowing))

    def _claim(self) -> tuple[AnyBulk, int, int]:
        """The next range to send. The last one takes its transfer out of the queue: it can no longer be removed."""
        transfer = self._bulk[0]
        begin, end = transfer.claim()
        if transfer.left:
            self._bulk.popleft()
        return transfer, begin, end


def _yields(first: Bulk, second: Bulk) -> bool:
    """One that has begun is not overtaken: the other end takes the chunks of one transfer at a time."""
    return first.move.urgency < second.move.urgency and not first.begun
