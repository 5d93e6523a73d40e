"""Serves what a monitor knows: a description on demand, a stream of them, and a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.timing import PUSH_SECONDS
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.caller_budget import CallerBudget, host_of
from lockstep.transports.control.codec import WireError, decode_witness_request, encode_description, encode_snapshot
from lockstep.transports.control.server import ControlServer
from lockstep.transports.quiet_grpc import grpc


def snapshot_handler(snapshot: Callable[[], bytes]) -> grpc.RpcMethodHandler:
    """A handler of ``Snapshot`` that answers with this JSON; JSON that is too large is refused with its size, and so
    is a host that asks all the time."""
    return _json_handler(lambda _: snapshot())


def witness_handler(make_statement: Callable[[str], bytes]) -> grpc.RpcMethodHandler:
    """A handler of ``Witness`` that answers with this JSON about the task in question."""
    return _json_handler(lambda request: make_statement(decode_witness_request(request)))


def _json_handler(answer: Callable[[bytes], bytes]) -> grpc.RpcMethodHandler:
    budget = CallerBudget()

    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        if not budget.take(host_of(context.peer())):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "your host has asked too often; ask again in a second")
        try:
            return encode_snapshot(answer(request))
        except WireError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise AssertionError("abort raises") from error

    return grpc.unary_unary_rpc_method_handler(handle)


def inbox_handler(take: Callable[[bytes], None], limit: int) -> grpc.RpcMethodHandler:
    """A handler of ``Tell`` that passes on what is sent to it, up to ``limit`` bytes, on a thread of gRPC."""

    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        if len(request) > limit:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(request)} bytes are more than the {limit} accepted"
            )
        take(request)
        return b""

    return grpc.unary_unary_rpc_method_handler(handle)


class _Watchers:
    """The running Watch streams. Each holds a thread, so there is a limit, and further watchers are refused."""

    def __init__(self, describe: Callable[[], Description], changed: Broadcast, limit: int) -> None:
        self._describe = describe
        self._changed = changed
        self._free = threading.Semaphore(limit)
        self._limit = limit

    def serve(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:  # noqa: ARG002
        if not self._free.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"it already has {self._limit} watchers, its limit")
        try:
            yield from self._stream(context)
        finally:
            self._free.release()

    def _stream(self, context: grpc.ServicerContext) -> Iterator[bytes]:
        # A stream that was cut off must free its thread at once, not at the next push.
        if not context.add_callback(self._changed.notify):
            return
        while context.is_active() and not self._changed.closed:
            seen = self._changed.number
            yield encode_description(self._describe())
            self._changed.wait(seen, PUSH_SECONDS)


def add_monitor_service(
    server: ControlServer,
    describe: Callable[[], Description],
    changed: Broadcast,
    snapshot: Callable[[], bytes],
    *,
    max_watchers: int = 64,
) -> None:
    """Serve ``Monitor`` at ``server``, before it starts. ``changed.notify()`` pushes a description to all watchers.

    ``describe`` and ``snapshot`` are called on gRPC's threads. Give the server more threads than ``max_watchers``,
    or watchers keep other calls from being answered. ``changed.close()`` ends all streams cleanly.
    """
    if server.threads <= max_watchers:
        raise ValueError(f"{max_watchers} watchers need a server with more than {server.threads} threads")

    def describe_once(request: bytes, context: grpc.ServicerContext) -> bytes:  # noqa: ARG001
        return encode_description(describe())

    watchers = _Watchers(describe, changed, max_watchers)
    server.add_handlers(
        "Monitor",
        {
            "Describe": grpc.unary_unary_rpc_method_handler(describe_once),
            "Watch": grpc.unary_stream_rpc_method_handler(watchers.serve),
            "Snapshot": snapshot_handler(snapshot),
        },
    )
