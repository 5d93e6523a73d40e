"""Owners of links for tests, which record their callbacks and can be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.messages import Envelope, Hello, Refused
from lockstep.transports.control.link import ControlLink, serve_links
from lockstep.transports.control.server import ControlServer

PATIENCE = 10.0


def hello(task: str, incarnation: int = 1) -> Hello:
    return Hello(task, incarnation, 0, "test", ())


class RecordingOwner:
    """Implements LinkEvents and keeps every callback."""

    def __init__(self) -> None:
        self._heard = threading.Condition()
        self.opened: list[Hello] = []
        self.messages: list[Envelope] = []
        self.lost: list[str] = []
        self.link: ControlLink | None = None

    def on_open(self, peer: Hello) -> None:
        with self._heard:
            self.opened.append(peer)
            self._heard.notify_all()

    def on_message(self, envelope: Envelope) -> None:
        with self._heard:
            self.messages.append(envelope)
            self._heard.notify_all()

    def on_lost(self, reason: Reason) -> None:
        with self._heard:
            self.lost.append(reason.text)
            self._heard.notify_all()

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        with self._heard:
            happened = self._heard.wait_for(condition, seconds)
        assert happened, f"not within {seconds} s: {what}; opened {self.opened}, lost {self.lost}"

    def wait_open(self) -> None:
        self.wait_for("the link opens", lambda: bool(self.opened or self.lost))
        assert self.opened, self.lost

    def wait_lost(self) -> str:
        self.wait_for("the link is lost", lambda: bool(self.lost))
        return self.lost[0]

    def wait_messages(self, count: int) -> None:
        self.wait_for(f"{count} messages", lambda: len(self.messages) >= count)


class Acceptor:
    """A server that accepts links and remembers the owner of each."""

    def __init__(self, server: ControlServer, answer: Callable[[Hello], Hello | Refused]) -> None:
        self.server = server
        self.owners: list[RecordingOwner] = []
        serve_links(server, answer, self._make_owner)
        server.start()

    def _make_owner(self, peer: Hello, link: ControlLink) -> RecordingOwner:
        owner = RecordingOwner()
        owner.link = link
        self.owners.append(owner)
        return owner


@contextmanager
def accepting(answer: Callable[[Hello], Hello | Refused] | None = None) -> Iterator[Acceptor]:
    server = ControlServer("127.0.0.1", 0, threads=8)
    try:
        yield Acceptor(server, answer or (lambda peer: hello("/acceptor", 2)))
    finally:
        server.stop(0.0)


def wait_until(what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for something that is not announced (a thread or a process that ends)."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {seconds} s: {what}")
