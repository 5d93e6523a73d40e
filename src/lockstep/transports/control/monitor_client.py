"""Asks the monitors of other tasks, and the tasks themselves, what they know."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from lockstep.foreign import plain, read_json
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.core.timing import ASK_SECONDS, PROBE_SECONDS
from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.codec import WireError, decode_description, decode_snapshot, encode_witness_request
from lockstep.transports.control.reasons import explain, why_no_answer
from lockstep.transports.control.server import method_path
from lockstep.transports.quiet_grpc import grpc

Answer = TypeVar("Answer")

LEAST_SECONDS: Final = 0.05
"""What a question gets after the others have used up their common time."""


class Unreachable(Exception):  # noqa: N818  # reads as the finding it is
    """Nothing at this address answered as expected; ``reason`` is a plain phrase."""

    def __init__(self, address: str, silence: Silence) -> None:
        super().__init__(silence.text)
        self.address = address
        self.silence = silence
        self.reason = silence.text
        self.reach = silence.reach


def describe(address: str, timeout: float) -> Description:
    """Ask the monitor at ``host:port`` once. Raises ``Unreachable`` after at most about ``timeout`` + 1 s."""
    with open_channel(address) as channel:
        return _ask(channel, address, "Monitor", "Describe", timeout, decode_description)


def describe_with_snapshot(
    address: str, timeout: float, probe_seconds: float, deadline: float = math.inf
) -> tuple[Description, bytes]:
    """A monitor's description and its JSON snapshot, which is empty where only the description came.

    Raises ``Unreachable`` after at most about ``timeout`` and ``probe_seconds``. ``deadline``: see ``seconds_left``.
    """
    with open_channel(address) as channel:
        found = _ask(channel, address, "Monitor", "Describe", timeout, decode_description, probe_seconds)
        try:
            left = seconds_left(timeout, deadline)
            return found, _ask(channel, address, "Monitor", "Snapshot", left, decode_snapshot, 0.0)
        except Unreachable:
            return found, b""


def seconds_left(seconds: float, deadline: float) -> float:
    """How long one of several questions may take that share a deadline on the monotonic clock."""
    return max(LEAST_SECONDS, min(seconds, deadline - time.monotonic()))


def fetch_snapshot(address: str, service: str, timeout: float, probe_seconds: float = PROBE_SECONDS) -> bytes:
    """The JSON snapshot of a ``Monitor`` or a ``Task`` at ``host:port``. Raises ``Unreachable``."""
    with open_channel(address) as channel:
        return _ask(channel, address, service, "Snapshot", timeout, decode_snapshot, probe_seconds)


def fetch_metrics(address: str, timeout: float) -> bytes:
    """JSON of what the task at ``host:port`` counts. Raises ``Unreachable``."""
    with open_channel(address) as channel:
        return _ask(channel, address, "Task", "Metrics", timeout, decode_snapshot, 0.0)


def fetch_statement(address: str, task: str, timeout: float) -> bytes:
    """JSON of what the task at ``host:port`` finds at the address of another. Raises ``Unreachable``."""
    with open_channel(address) as channel:
        return _ask(channel, address, "Task", "Witness", timeout, decode_snapshot, 0.0, encode_witness_request(task))


def snapshot_fields(address: str, service: str) -> dict[str, Any]:
    """The fields of that snapshot; empty if nothing answers, or the answer is not an object."""
    try:
        fields = read_json(fetch_snapshot(address, service, ASK_SECONDS))
    except (Unreachable, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def fetch_stack(address: str, timeout: float, probe_seconds: float = PROBE_SECONDS) -> bytes:
    """The JSON snapshot of a monitor with the Python stack of its task. Raises ``Unreachable``."""
    with open_channel(address) as channel:
        return _ask(channel, address, "Monitor", "Stack", timeout, decode_snapshot, probe_seconds)


def tell(address: str, service: str, data: bytes, timeout: float) -> bool:
    """Leave ``data`` with the ``inbox_handler`` of a service at ``host:port``; returns whether it was accepted."""
    with open_channel(address) as channel:
        try:
            channel.unary_unary(method_path(service, "Tell"))(data, timeout=timeout)
        except grpc.RpcError:
            return False
    return True


def _ask(
    channel: grpc.Channel,
    address: str,
    service: str,
    method: str,
    timeout: float,
    read: Callable[[bytes], Answer],
    probe_seconds: float = PROBE_SECONDS,
    request: bytes = b"",
) -> Answer:
    """``probe_seconds``: how long it may take to find out why there was no answer."""
    try:
        return read(channel.unary_unary(method_path(service, method))(request, timeout=timeout))
    except grpc.RpcError as error:
        raise Unreachable(address, why_no_answer(error, address, timeout, probe_seconds)) from error
    except WireError as error:
        unreadable = Silence(Reach.BROKEN, f"{address} sent an answer that cannot be read: {error}")
        raise Unreachable(address, unreadable) from error


class Watch:
    """A running watch of one monitor. ``close`` ends it; no callback runs after it has returned."""

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
        except Exception as error:  # noqa: BLE001 - the owner must hear that the watch is over, and may begin another
            reason = f"{self._address} sent a description that means nothing: {plain(str(error), 200)}"
        finally:
            self._call.cancel()
            self._channel.close()
        if not self._closed:
            self._on_lost(reason)

    def close(self) -> None:
        """End the watch. May be called twice, and from a callback."""
        self._closed = True
        self._call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def watch(address: str, on_description: Callable[[Description], None], on_lost: Callable[[str], None]) -> Watch:
    """Follow the monitor at ``host:port``: a description at once, at every change, and at least once per second.

    Callbacks run on a thread of the watch and must not block. ``on_lost`` is the last one, and runs at once if
    nothing listens; the caller judges how much silence is too much.
    """
    return Watch(address, on_description, on_lost)
