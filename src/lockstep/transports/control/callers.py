"""Who connects to a port of gRPC and does not get as far as a call.

gRPC tells nobody about handshakes that fail. But it asks for the certificates at the start of each one, and at that
moment its connection is among the descriptors of this process: ``begun`` looks up there whose it is, and how it begins
(nothing is consumed). A caller that makes a call has proven itself; one whose connection is gone without a call was
refused. A look takes a tenth of a millisecond, more with many connections, so under a flood only some are looked at,
and the rest are counted.

At the port without TLS nothing is asked. There, connections are looked at every ``SWEEP_SECONDS``; what comes and goes
between two looks without a stream is not seen. Streams are refused, and said, by their handlers.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final
from urllib.parse import unquote

from lockstep.security.proof import Refusal
from lockstep.security.refusals import REFUSALS, Entrance, RefusalLog
from lockstep.transports.quiet_grpc import grpc

LOOK_SECONDS: Final = 0.05
"""The processor time that looks may take at once,"""
LOOK_SHARE: Final = 0.01
"""and in the long run."""
SETTLE_SECONDS: Final = 0.1
SWEEP_SECONDS: Final = 2.0
HANDSHAKE_SECONDS: Final = 6.0
"""gRPC cuts what has not shaken hands after 5 s, so a connection that is open for longer has."""
_MOST_PENDING: Final = 256
_MOST_PROVEN: Final = 4096
_DEFER_SECONDS: Final = 1
_FIRST_BYTES: Final = 3
_HTTP2: Final = b"PRI"
"""So begins a client of gRPC without TLS."""
_TCP_CLOSE_WAIT: Final = 8
_TLS_RECORDS: Final = range(20, 24)
"""A handshake begins with 22; one that is looked at late may be beyond that."""

Source = tuple[str, int]
"""A caller's address and port."""


@dataclass(slots=True)
class _Pending:
    """A connection that has made no call yet."""

    descriptor: int
    refusal: Refusal
    """What it is refused for if it makes none."""
    since: float
    gone: bool = False
    known: bool = False
    """It is settled what it is, and it stays open."""


class CallerWatch:
    """The callers at one port. ``begun`` and ``called`` are called by threads of gRPC, and never wait."""

    def __init__(
        self,
        entrance: Entrance,
        *,
        plain: bool,
        log: RefusalLog = REFUSALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entrance = entrance
        self._plain = plain
        self._log = log
        self._clock = clock
        self._address = ""
        self._port = 0
        self._lock = threading.Lock()
        self._pending: dict[Source, _Pending] = {}
        self._proven: dict[str, Source] = {}
        """By gRPC's names, of connections that are open, or were when last looked at."""
        self._budget = LOOK_SECONDS
        self._budget_at = clock()
        self._unseen = [0, 0]
        """Handshakes that were not looked at: those of the time before, and new ones."""
        self._unseen_since = clock()
        self._refused_at = -math.inf
        """When one was refused last. If none was, those that were not looked at are tasks of a large cluster that try,
        all at once, whether the port is open."""
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"callers-{entrance.name.lower()}", daemon=True)

    def watch(self, address: str, port: int) -> None:
        """The port listens, but is not served yet."""
        self._address, self._port = address, port
        if not self._plain:
            self._wait_for_first_bytes()
        self._thread.start()

    def _wait_for_first_bytes(self) -> None:
        """Let the kernel hold back connections that have said nothing, for a second: a client of TLS speaks first. So
        their beginning can be seen, and those that only try whether a port is open are not confused with the rest."""
        for one, _ in _own_sockets(self._port):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_SECONDS)

    def close(self) -> None:
        self._over.set()
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    # -- on threads of gRPC --

    def begun(self) -> None:
        """A handshake begins."""
        with self._lock:
            now = self._clock()
            self._budget = min(LOOK_SECONDS, self._budget + (now - self._budget_at) * LOOK_SHARE)
            self._budget_at = now
            if self._budget > 0.0:
                began = time.thread_time()
                self._look(now)
                self._budget -= time.thread_time() - began
            else:
                self._unseen[1] += 1
        self._wanted.set()

    def called(self, peer: str) -> None:
        """This caller has made a call, so its handshake is complete."""
        if peer in self._proven:
            return
        source = _source_of(peer)
        with self._lock:
            if self._pending.pop(source, None) is None:
                self._seen_after_all(1)
            if len(self._proven) >= _MOST_PROVEN:
                self._proven.clear()
            self._proven[peer] = source

    def _seen_after_all(self, count: int) -> None:
        for age in (0, 1):
            found = min(count, self._unseen[age])
            self._unseen[age] -= found
            count -= found

    def noting(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """The same handler, which notes who calls."""
        ((behavior, make),) = (
            (behavior, make)
            for behavior, make in (
                (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
                (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
                (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
                (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
            )
            if behavior is not None
        )

        @wraps(behavior)
        def noted(request: Any, context: grpc.ServicerContext) -> Any:
            self.called(context.peer())
            return behavior(request, context)

        return make(noted, handler.request_deserializer, handler.response_serializer)

    def _look(self, now: float) -> None:
        """Find the connections that were not here at the last look. With the lock."""
        here, new = set(), 0
        proven = set(self._proven.values())
        for one, descriptor in _own_sockets(self._port):
            with suppress(OSError, IndexError):  # its number may be that of another kind of socket by now
                source = _readable(one.getpeername())
                here.add(source)
                if source not in proven and source not in self._pending and len(self._pending) < _MOST_PENDING:
                    refusal = Refusal.LATE if self._plain else _how_it_begins(one)
                    self._pending[source] = _Pending(descriptor, refusal, now)
                    new += 1
        self._seen_after_all(max(0, new - 1))
        self._proven = {peer: source for peer, source in self._proven.items() if source in here}

    # -- on its own thread --

    def _run(self) -> None:
        while not self._over.is_set():
            pause = SWEEP_SECONDS if self._plain else SETTLE_SECONDS if self._pending or any(self._unseen) else None
            if pause is None:
                self._wanted.wait()
                self._wanted.clear()
            else:
                self._over.wait(pause)
            if not self._over.is_set():
                self.settle()

    def settle(self) -> None:
        """Say who is gone without a call."""
        now = self._clock()
        with self._lock:
            refused = [one for one in list(self._pending.items()) if self._is_refused(*one, now)]
            unseen = self._unseen_for_long(now)
            if self._plain:
                self._look(now)
        for source, one in refused:
            self._log.note(self._entrance, self._address, source[0], one.refusal)
        if any(one.refusal is not Refusal.CLOSED for _, one in refused):
            self._refused_at = now
        if unseen and now - self._refused_at < 3 * HANDSHAKE_SECONDS:
            self._log.note(self._entrance, self._address, "", Refusal.UNPROVEN, unseen)

    def _is_refused(self, source: Source, one: _Pending, now: float) -> bool:
        """Whether that has become known now."""
        if _is_open(one.descriptor, source):
            lasts = now - one.since > (SWEEP_SECONDS / 2 if self._plain else HANDSHAKE_SECONDS)
            known, one.known = one.known, one.known or lasts
            return self._plain and one.known and not known  # behind TLS, it has shaken hands
        if not one.gone:
            one.gone = True  # its first call may come a moment after it is gone
            return False
        del self._pending[source]
        if one.refusal is Refusal.LATE and not self._plain and now - one.since < HANDSHAKE_SECONDS / 2:
            one.refusal = Refusal.CLOSED
        return not one.known

    def _unseen_for_long(self, now: float) -> int:
        if now - self._unseen_since < HANDSHAKE_SECONDS:
            return 0
        over, self._unseen, self._unseen_since = self._unseen[0], [self._unseen[1], 0], now
        return over


def _how_it_begins(one: socket.socket) -> Refusal:
    """For what this connection is refused if it does not complete its handshake."""
    try:
        first = one.recv(_FIRST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return Refusal.LATE
    if not first:
        return Refusal.CLOSED
    if first[0] in _TLS_RECORDS:
        (state,) = struct.unpack_from("B", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8))
        return Refusal.CLOSED if state == _TCP_CLOSE_WAIT else Refusal.UNPROVEN
    return Refusal.NO_KEY_THERE if first == _HTTP2[: len(first)] else Refusal.MALFORMED


def _own_sockets(port: int) -> Iterator[tuple[socket.socket, int]]:
    """The sockets of this process with this local port, listening ones too; only to be looked at."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no descriptor is free
        return
    for name in names:
        with suppress(OSError), _borrowed(int(name)) as one:
            where = one.getsockname()
            if type(where) is tuple and where[1] == port:
                yield one, int(name)


class _borrowed:  # noqa: N801  # a context manager; a generator would take twice the time
    """A descriptor of gRPC as a socket. Neither closed nor duplicated: gRPC relies on its being the only one."""

    __slots__ = ("_one",)

    def __init__(self, descriptor: int) -> None:
        self._one = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)

    def __enter__(self) -> socket.socket:
        return self._one

    def __exit__(self, *_: object) -> None:
        self._one.detach()


def _is_open(descriptor: int, source: Source) -> bool:
    # The descriptor may belong to another kind of socket by now, whose name has no address.
    with suppress(OSError, TypeError, ValueError, IndexError), _borrowed(descriptor) as one:
        return _readable(one.getpeername()) == source
    return False


def _readable(name: Any) -> Source:
    """gRPC has IPv6 sockets for IPv4 addresses too."""
    host = str(name[0]).partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, int(name[1])


def _source_of(peer: str) -> Source:
    """gRPC writes ``ipv4:10.0.0.1:40000`` and ``ipv6:%5B::1%5D:40000``."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _readable((host.strip("[]"), port)) if port.isdecimal() else (peer, 0)


def host_in(peer: str) -> str:
    """The address in gRPC's name of a caller, for people."""
    return _source_of(peer)[0]
