"""What a monitor serves, and what its clients get."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from helpers.wire import PATIENCE, wait_until
from lockstep.protocol.core.messages import Description
from lockstep.transports.control import monitor_service
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.codec import MAX_MESSAGE_BYTES
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_snapshot, watch
from lockstep.transports.control.monitor_service import add_monitor_service, snapshot_handler
from lockstep.transports.control.server import ControlServer


class Monitor:
    """A monitor's service whose description the test sets."""

    def __init__(self, max_watchers: int = 4) -> None:
        self.phase = "starting"
        self.json = b'{"task": 1}'
        self.changed = Broadcast()
        self.server = ControlServer("127.0.0.1", 0, threads=max_watchers + 4)
        add_monitor_service(self.server, self.describe, self.changed, lambda: self.json, max_watchers=max_watchers)
        self.server.add_handlers("Task", {"Snapshot": snapshot_handler(lambda: b'"of the task"')})
        self.server.start()

    @property
    def address(self) -> str:
        return self.server.address

    def describe(self) -> Description:
        return Description("/t", "host", 1, 2, 3, self.phase, 0.5, "127.0.0.1:1", False, 0, "0.1", 0)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.changed.notify()

    def stop(self) -> None:
        self.changed.close()
        self.server.stop(0)


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    before = set(threading.enumerate())
    monitor = Monitor()
    yield monitor
    monitor.stop()
    wait_until("all threads have ended", lambda: not [t for t in threading.enumerate() if t not in before])


class Watcher:
    """Records what a watch delivers."""

    def __init__(self, address: str) -> None:
        self.heard = threading.Condition()
        self.phases: list[str] = []
        self.lost: list[str] = []
        self.handle = watch(address, self._on_description, self._on_lost)

    def _on_description(self, description: Description) -> None:
        with self.heard:
            self.phases.append(description.phase)
            self.heard.notify_all()

    def _on_lost(self, reason: str) -> None:
        with self.heard:
            self.lost.append(reason)
            self.heard.notify_all()

    def wait_phase(self, phase: str) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: phase in self.phases, PATIENCE), (self.phases, self.lost)

    def wait_lost(self) -> str:
        with self.heard:
            assert self.heard.wait_for(lambda: bool(self.lost), PATIENCE)
            return self.lost[0]


def test_describe_gives_the_description_of_now(monitor: Monitor) -> None:
    assert describe(monitor.address, 5.0) == monitor.describe()
    monitor.phase = "training"
    assert describe(monitor.address, 5.0).phase == "training"


def test_snapshots_of_monitor_and_task_are_the_bytes_they_gave(monitor: Monitor) -> None:
    assert fetch_snapshot(monitor.address, "Monitor", 5.0) == monitor.json
    assert fetch_snapshot(monitor.address, "Task", 5.0) == b'"of the task"'


def test_a_snapshot_that_is_too_large_is_refused_with_its_size(monitor: Monitor) -> None:
    monitor.json = bytes(MAX_MESSAGE_BYTES + 1)
    with pytest.raises(Unreachable, match="larger than the 16777216 we accept"):
        fetch_snapshot(monitor.address, "Monitor", 5.0)


def test_nobody_there_is_unreachable_with_the_reason() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(Unreachable, match="refuses connections; nothing listens there") as unreachable:
            describe(address, 5.0)
        assert unreachable.value.address == address
    with pytest.raises(Unreachable, match="does not resolve"):
        describe("no-such-host.invalid:1", 5.0)
    with pytest.raises(Unreachable, match="has no port; write HOST:PORT"):
        describe("no-port", 5.0)


def test_a_silent_listener_is_unreachable_after_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(Unreachable, match=r"no answer within 0\.2 s"):
            describe(f"127.0.0.1:{silent.getsockname()[1]}", 0.2)


def test_something_that_is_no_grpc_server_is_recognised() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer_like_a_web_server() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer_like_a_web_server)
        thread.start()
        with pytest.raises(Unreachable, match="is not a Lockstep task"):
            describe(f"127.0.0.1:{listener.getsockname()[1]}", 2.0)
        thread.join()


def test_a_watcher_hears_the_present_at_once_and_each_change_without_delay(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_service, "PUSH_SECONDS", 10 * PATIENCE)  # no push comes besides
    watcher = Watcher(monitor.address)
    watcher.wait_phase("starting")
    for phase in ("joining", "training", "done"):
        monitor.enter(phase)
        watcher.wait_phase(phase)
    watcher.handle.close()
    watcher.handle.close()
    assert watcher.lost == []


def test_a_watcher_hears_something_every_second_without_a_change(monitor: Monitor) -> None:
    watcher = Watcher(monitor.address)
    with watcher.heard:
        assert watcher.heard.wait_for(lambda: len(watcher.phases) >= 2, 3.0)
    watcher.handle.close()


def test_one_watcher_too_many_is_told_and_a_place_becomes_free_again(monitor: Monitor) -> None:
    watchers = [Watcher(monitor.address) for _ in range(4)]
    for watcher in watchers:
        watcher.wait_phase("starting")
    assert "it already has 4 watchers" in Watcher(monitor.address).wait_lost()
    assert describe(monitor.address, 5.0)  # watchers do not keep single questions from being answered
    watchers[0].handle.close()

    def gets_in() -> bool:
        late = Watcher(monitor.address)
        with late.heard:
            late.heard.wait_for(lambda: bool(late.phases or late.lost), PATIENCE)
        late.handle.close()
        return bool(late.phases)

    wait_until("the place is free", gets_in)
    for watcher in watchers:
        watcher.handle.close()


def test_a_watch_ends_when_the_monitor_ends(monitor: Monitor) -> None:
    watcher = Watcher(monitor.address)
    watcher.wait_phase("starting")
    monitor.stop()
    assert watcher.wait_lost()


def test_a_watch_of_nobody_is_lost_at_once_with_the_reason() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        reason = Watcher(f"127.0.0.1:{reserved.getsockname()[1]}").wait_lost()
    assert "refuses connections; nothing listens there" in reason


def test_more_watchers_than_threads_are_refused_when_the_service_is_added() -> None:
    server = ControlServer("127.0.0.1", 0, threads=4)
    with pytest.raises(ValueError, match="more than 4 threads"):
        add_monitor_service(server, Monitor.describe, Broadcast(), bytes, max_watchers=4)  # type: ignore[arg-type]
    server.stop(0)
