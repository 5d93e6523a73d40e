"""Where the accepting ends of a transport's links wait for the peers that dial them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.timing import CONNECT_SECONDS, MATCH_SECONDS
from lockstep.transports.base import LinkState, PeerAddress, TransportError
from lockstep.transports.frame_error import FrameError
from lockstep.transports.lifecycle import OPEN

_Incarnation = tuple[str, int]


class MeetingEndpoint(Protocol):
    """An endpoint whose peer may have to be waited for."""

    peer: PeerAddress

    @property
    def state(self) -> LinkState: ...

    def attach(self, interrupt: Callable[[], object]) -> None:
        """From now on ``interrupt`` ends whatever the endpoint's thread is waiting for."""

    def close(self) -> None: ...


AnyEndpoint = TypeVar("AnyEndpoint", bound=MeetingEndpoint)
Visit = TypeVar("Visit")


@dataclass(slots=True)
class ExpectedVisitor(Generic[AnyEndpoint, Visit]):
    """An endpoint, and the visit that it waits for if it accepts (None: give up)."""

    endpoint: AnyEndpoint
    visits: SimpleQueue[Visit | None] = field(default_factory=SimpleQueue)
    taken: bool = False


class Meeting(Generic[AnyEndpoint, Visit]):
    """All endpoints of one transport of one task."""

    def __init__(self, task: str, incarnation: int) -> None:
        self._task = task
        self._incarnation = incarnation
        self._arrivals = threading.Condition()
        self._expected: dict[_Incarnation, ExpectedVisitor[AnyEndpoint, Visit]] = {}
        self._endpoints: list[AnyEndpoint] = []
        self._closed = False

    def add(self, endpoint: AnyEndpoint, dials: bool) -> ExpectedVisitor[AnyEndpoint, Visit]:
        """Take part in a link; an endpoint that does not dial is expected to be visited."""
        peer = endpoint.peer
        expected: ExpectedVisitor[AnyEndpoint, Visit] = ExpectedVisitor(endpoint)
        with self._arrivals:
            if self._closed:
                raise TransportError("this transport is closed: make another one")
            if not dials:
                before = self._expected.get((peer.task, peer.incarnation))
                if before is not None and before.endpoint.state in OPEN:
                    raise TransportError(
                        f"there is already a link with this incarnation of {peer.task}: close it first"
                    )
                self._expected[peer.task, peer.incarnation] = expected
                self._arrivals.notify_all()
            self._endpoints = [e for e in self._endpoints if e.state in OPEN]
            self._endpoints.append(endpoint)
        return expected

    def endpoints(self) -> list[AnyEndpoint]:
        """The endpoints that may still be open."""
        return list(self._endpoints)

    def close(self) -> bool:
        """Close all endpoints, and admit no more; False if this was done before."""
        with self._arrivals:
            first, self._closed = not self._closed, True
            self._arrivals.notify_all()
        for endpoint in self._endpoints:
            endpoint.close()
        return first

    @contextmanager
    def visit(self, expected: ExpectedVisitor[AnyEndpoint, Visit]) -> Iterator[Visit]:
        """Wait for the peer, on the endpoint's thread, and be its only link until the end of the ``with`` block.
        ``FrameError`` if the peer does not come."""
        endpoint = expected.endpoint
        peer = endpoint.peer
        endpoint.attach(lambda: expected.visits.put(None))
        try:
            try:
                visit = expected.visits.get(timeout=CONNECT_SECONDS)
            except Empty:
                visit = None
            if visit is None:
                raise FrameError(f"{peer.task} did not connect within {CONNECT_SECONDS:g} s")
            yield visit
        finally:
            with self._arrivals:
                expected.taken = True
                if self._expected.get((peer.task, peer.incarnation)) is expected:
                    del self._expected[peer.task, peer.incarnation]

    def match(self, task: str, incarnation: int, meant: int) -> ExpectedVisitor[AnyEndpoint, Visit]:
        """The endpoint that waits for this visitor; the text of a ``FrameError`` is what the visitor reads.
        ``meant``: which incarnation of this task it looks for."""
        if meant != self._incarnation:
            raise FrameError(f"{self._task} is in incarnation {hex64(self._incarnation)} now, not in {hex64(meant)}")
        deadline = time.monotonic() + MATCH_SECONDS
        with self._arrivals:
            while not self._closed:
                expected = self._expected.get((task, incarnation))
                if expected is not None and not expected.taken:
                    expected.taken = True
                    return expected
                if expected is not None and expected.endpoint.state in OPEN:
                    raise FrameError(f"{self._task} already has a link with this incarnation of {task}")
                if not self._arrivals.wait(max(0.0, deadline - time.monotonic())):
                    raise FrameError(f"{self._task} does not expect {task} in incarnation {hex64(incarnation)}")
        raise FrameError(f"{self._task} is closing")
