"""Asks the monitors of other tasks, and their tasks, what they know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lockstep.protocol.messages import Description
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.wire.channels import open_channel
from lockstep.transports.wire.codec import WireError, decode_description, decode_snapshot
from lockstep.transports.wire.reasons import explain
from lockstep.transports.wire.server import method_path

Answer = TypeVar("Answer")


class Unreachable(Exception):  # noqa: N818  # reads as the finding it is
    """Nobody answered as expected at this address; ``reason`` is a plain phrase."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(reason)
        self.address = address
        self.reason = reason


def describe(address: str, timeout: float) -> Description:
    """Ask the monitor at ``host:port`` once. Raises ``Unreachable`` after at most about ``timeout`` + 1 s."""
    return _ask(address, "Monitor", "Describe", timeout, decode_description)


def fetch_snapshot(address: str, service: str, timeout: float) -> bytes:
    """The JSON snapshot of a ``Monitor`` or a ``Task`` at ``host:port``. Raises ``Unreachable``."""
    return _ask(address, service, "Snapshot", timeout, decode_snapshot)


def fetch_stack(address: str, timeout: float) -> bytes:
    """The JSON snapshot of a monitor with the Python stack of its task. Raises ``Unreachable``."""
    return _ask(address, "Monitor", "Stack", timeout, decode_snapshot)


def tell(address: str, service: str, data: bytes, timeout: float) -> bool:
    """Leave ``data`` with the ``inbox_handler`` of a service at ``host:port``; whether it was taken."""
    with open_channel(address) as channel:
        try:
            channel.unary_unary(method_path(service, "Tell"))(data, timeout=timeout)
        except grpc.RpcError:
            return False
    return True


def _ask(address: str, service: str, method: str, timeout: float, read: Callable[[bytes], Answer]) -> Answer:
    with open_channel(address) as channel:
        try:
            return read(channel.unary_unary(method_path(service, method))(b"", timeout=timeout))
        except grpc.RpcError as error:
            raise Unreachable(address, explain(error, address, timeout)) from error
        except WireError as error:
            raise Unreachable(address, f"{address} gave an answer that cannot be read: {error}") from error


class Watch:
    """A running watch of one monitor. ``close`` ends it; no callback comes after it has returned."""

    def __init__(
        self, address: str, on_description: Callable[[Description], None], on_lost: Callable[[str], None]
    ) -> None:
        self._address = address
        self._on_description = on_description
        self._on_lost = on_lost
        self._closed = False
        self._channel = open_channel(address)
        self._call = self._channel.unary_stream(method_path("Monitor", "Watch"))(b"")
        self._thread = threading.Thread(target=self._run, name=f"watch-{address}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        reason = f"{self._address} ended the watch"
        try:
            for data in self._call:
                if self._closed:
                    return
                self._on_description(decode_description(data))
        except grpc.RpcError as error:
            if self._closed:
                return
            reason = explain(error, self._address)
        except WireError as error:
            reason = f"{self._address} sent a description that cannot be read: {error}"
        finally:
            self._call.cancel()
            self._channel.close()
        if not self._closed:
            self._on_lost(reason)

    def close(self) -> None:
        """End the watch. May be called twice, also from a callback."""
        self._closed = True
        self._call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def watch(address: str, on_description: Callable[[Description], None], on_lost: Callable[[str], None]) -> Watch:
    """Follow the monitor at ``host:port``: a description at once, at every change, and at least once a second.

    Callbacks come on a thread of the watch and must not block. ``on_lost`` is the last one and comes at once where
    nothing listens; how much silence is too much is for the caller to judge.
    """
    return Watch(address, on_description, on_lost)
