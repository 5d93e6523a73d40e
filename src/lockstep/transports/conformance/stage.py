"""Sets up the nodes and links of one case, and takes them down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from lockstep.protocol.core.messages import Ticket
from lockstep.security.chosen import chosen_key
from lockstep.security.refusals import REFUSALS_THREAD
from lockstep.transports.conformance.events import PATIENCE, CaseFailed, Heard
from lockstep.transports.conformance.node import LocalNode, SuiteNode, note_for


class RemoteVictim(SuiteNode, Protocol):
    """A node in a separate process."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def freeze(self) -> None: ...
    def resume(self) -> None: ...


class NodeHosts(Protocol):
    """Starts nodes in separate processes, on this machine or another."""

    @property
    def elsewhere(self) -> bool:
        """Whether it starts nodes on another machine; then the second node of each pair is always one of them."""

    @property
    def own_address(self) -> str:
        """The address of this machine at which they reach this process's nodes."""

    def start(self, transport: str, task: str, incarnation: int) -> RemoteVictim:
        """A new node, which its ``close`` ends."""


def require(condition: bool, text: str) -> None:
    """Fail the case with ``text`` unless ``condition`` holds."""
    if not condition:
        raise CaseFailed(text)


def wait_until(what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for something that is not announced."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise CaseFailed(f"did not happen within {seconds:g} s: {what}")


@dataclass(slots=True)
class Way:
    """From a region of one node into a granted region of another, over one link."""

    source: SuiteNode
    source_link: int
    source_region: int
    target: SuiteNode
    target_link: int
    target_region: int
    ticket: Ticket

    def write(self, offset: int, nbytes: int, target_offset: int, tail: bytes = b"") -> int:
        return self._start(offset, nbytes, target_offset, tail, loan=False)

    def lend(self, offset: int, nbytes: int, target_offset: int, tail: bytes = b"") -> int:
        return self._start(offset, nbytes, target_offset, tail, loan=True)

    def _start(self, offset: int, nbytes: int, target_offset: int, tail: bytes, *, loan: bool) -> int:
        note = note_for(self.target_region, target_offset, nbytes, tail)
        link, region = self.source_link, self.source_region
        return self.source.start(link, region, offset, nbytes, self.ticket, target_offset, note, loan)

    def check(self, heard: Heard, offset: int, nbytes: int) -> None:
        """What arrived must be the bytes at ``offset`` of the source, all of them, at the time of the note."""
        require(heard.nbytes == nbytes, f"{nbytes} bytes were sent, {heard.nbytes} were announced")
        expected = self.source.digest(self.source_region, offset, nbytes)
        require(heard.digest == expected, f"{nbytes} bytes were announced, but other bytes were in place at that time")


@dataclass(slots=True)
class Pair:
    """Two nodes with a link that is up; ``a`` dialed and runs in this process."""

    a: LocalNode
    a_link: int
    b: SuiteNode
    b_link: int

    def way(self, nbytes: int, seed: int = 1) -> Way:
        """From ``a`` to ``b``, the source filled with noise."""
        return _make_way(self.a, self.a_link, self.b, self.b_link, nbytes, seed)

    def way_back(self, nbytes: int, seed: int = 2) -> Way:
        """From ``b`` to ``a``."""
        return _make_way(self.b, self.b_link, self.a, self.a_link, nbytes, seed)


def _make_way(source: SuiteNode, source_link: int, target: SuiteNode, target_link: int, nbytes: int, seed: int) -> Way:
    source_region = source.allocate(nbytes)
    source.fill(source_region, 0, nbytes, seed)
    target_region = target.allocate(nbytes)
    ticket = target.grant(target_region, source.address())
    return Way(source, source_link, source_region, target, target_link, target_region, ticket)


class Stage:
    """The nodes of one case. Leaving it closes them and checks that no threads are left."""

    def __init__(self, transport: str, hosts: NodeHosts | None = None) -> None:
        """``hosts`` are needed for cases with a node in a separate process."""
        self.transport = transport
        self.key = chosen_key()
        self._hosts = hosts
        self._own_address = "127.0.0.1" if hosts is None else hosts.own_address
        self._incarnations = count(0xA000_0000_0000_0001)
        self._nodes = ExitStack()
        self._threads_before: set[threading.Thread] = set()

    def __enter__(self) -> Stage:
        self._threads_before = set(threading.enumerate())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._nodes.close()
        if kind is None:
            wait_until("all threads of the transport have ended", lambda: not self._new_threads(), 10.0)

    def _new_threads(self) -> list[threading.Thread]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads_before]
        return [thread for thread in new if thread.name != REFUSALS_THREAD]  # of the process, not of the transport

    def node(self, task: str) -> LocalNode:
        """A node in this process, in a new incarnation."""
        node = LocalNode(self.transport, task, next(self._incarnations), self._own_address, key=self.key)
        self._nodes.callback(node.close)
        return node

    def victim(self, task: str) -> RemoteVictim:
        """A node in a separate process, in a new incarnation."""
        if self._hosts is None:
            raise ValueError("this stage has no hosts for nodes in separate processes; pass some")
        node = self._hosts.start(self.transport, task, next(self._incarnations))
        self._nodes.callback(node.close)
        return node

    def join(self, a: SuiteNode, b: SuiteNode) -> tuple[int, int]:
        """Link two nodes, ``a`` dialing, and wait until both ends are up."""
        a_address, b_address = a.address(), b.address()
        b_link = b.connect(a_address, False)
        a_link = a.connect(b_address, True)
        a.log.wait("up", link=a_link)
        b.log.wait("up", link=b_link)
        return a_link, b_link

    def pair(self) -> Pair:
        """Two nodes in this process, or one here and one on another machine."""
        elsewhere = self._hosts is not None and self._hosts.elsewhere
        return self._pair_with(self.victim("/suite/b") if elsewhere else self.node("/suite/b"))

    def pair_with_victim(self) -> tuple[Pair, RemoteVictim]:
        """A node in this process, and one that can be killed or frozen."""
        victim = self.victim("/suite/b")
        return self._pair_with(victim), victim

    def _pair_with(self, b: SuiteNode) -> Pair:
        a = self.node("/suite/a")
        a_link, b_link = self.join(a, b)
        return Pair(a, a_link, b, b_link)
