"""One watcher a host: the one beside rank 0 asks the others what they see, and speaks for all.

They find each other by what the launcher told the ranks: the watcher beside rank 0 listens at the address of rank 0,
one port further than rank 0 itself, and the others come there. Both ends prove that they know the job's key. A watcher
that cannot reach the first one speaks for its own host.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lockstep.flight.recording import Recording
from lockstep.foreign import plain, read_json
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.security.listening import ProvenListener
from lockstep.security.proof import Parties, ProofError
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.wire import Claim, ProvenSocket, dial
from lockstep.version import __version__
from lockstep.watch import phrases
from lockstep.watch.local_ranks import LocalRanks
from lockstep.watch.sight_codec import MAX_BYTES, SightsError, sights_from_json, sights_to_json
from lockstep.watch.sights import RankSight

STEPS_SECONDS: Final = 1.0
"""For the answer to a small question."""
SIGHTS_SECONDS: Final = 6.0
"""For an answer that takes stacks."""
ASK_SECONDS: Final = 0.5
"""Between two questions how far the ranks have come."""
DIAL_SECONDS: Final = 2.0
AGAIN_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 10.0
"""A watcher that is asked nothing for so long looks for the first one anew."""
_MOST_AT_ONCE: Final = 64
_STEPS, _SIGHTS, _STACKS = b"steps", b"sights", b"stacks"
_PURPOSE: Final = "watch"


def _parties(_: Claim | None = None) -> Parties:
    return Parties(purpose=_PURPOSE, dialer="watcher", acceptor="first watcher", version=__version__)


def _key() -> bytes | None:
    key = chosen_key()
    return None if key is None else key.sub(Purpose.WATCH)


@dataclass(slots=True)
class ClockGap:
    """How far the clock of another host is ahead of this one's, as far as its answers tell."""

    ahead: float = 0.0
    within: float = float("inf")
    """So sure is that: the shortest time an answer took."""

    def learn(self, theirs: float, ours: float, took: float) -> None:
        """What it read in an answer that came just now and took so long."""
        if took < self.within:
            self.ahead, self.within = theirs - (ours - took / 2), took

    def ours(self, recording: Recording) -> Recording:
        """With times by this host's clock."""
        calls = tuple(replace(call, created=call.created - self.ahead) for call in recording.calls)
        return replace(recording, calls=calls)


@dataclass(slots=True)
class _Other:
    """The watcher of another host."""

    link: ProvenSocket
    host: str
    life: str
    """Hosts may have the same name, as containers do; watchers differ by this."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    steps: dict[int, tuple[int, float]] = field(default_factory=dict)
    world: int = 0
    lost: int = 0
    asked: float = 0.0
    clock: ClockGap = field(default_factory=ClockGap)

    def ask(self, question: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        with self.lock:
            self.link.send(question, deadline)
            return self.link.receive(MAX_BYTES, deadline)


class AllRanks:
    """The ranks of all hosts, seen from the one with rank 0."""

    def __init__(self, local: LocalRanks, address: tuple[str, int], say: Callable[[str], None]) -> None:
        self._local = local
        self._say = say
        self._others: dict[str, _Other] = {}
        self._silent: dict[str, str] = {}
        self._lost = False
        listener = socket.create_server(("", address[1]), family=_family(address[0]), backlog=64)
        refused = REFUSALS.at(Entrance.WATCH, f"{address[0]}:{address[1]}")
        self._door = ProvenListener(listener, _key(), _parties, self._let_in, "watchers", refused)

    def close(self) -> None:
        for other in self._others.values():
            other.over.set()
        self._door.close()

    def _let_in(self, link: ProvenSocket) -> None:
        """On a thread of its own, which belongs to this watcher until it leaves."""
        try:
            fields: Any = read_json(link.receive(1 << 16, time.monotonic() + STEPS_SECONDS), 1 << 16)
            other = _Other(link, plain(str(fields["host"]), 200), plain(str(fields["life"]), 64))
            ranks = [int(rank) for rank in fields["ranks"]]
        except (ProofError, ValueError, KeyError, TypeError):
            link.close()
            return
        self._others[other.life] = other
        self._silent.pop(other.life, None)
        self._say(phrases.other_host_joined(other.host, ranks))
        other.over.wait()
        link.close()

    # -- what a watcher asks --

    @property
    def world(self) -> int:
        return max([self._local.world, *(other.world for other in self._others.values())])

    @property
    def silent_hosts(self) -> tuple[str, ...]:
        return tuple(sorted(self._silent.values()))

    def take_lost(self) -> bool:
        """Whether another host has lost a rank since the last question."""
        lost, self._lost = self._lost, False
        return lost

    def steps(self) -> Mapping[int, tuple[int, float]]:
        found = dict(self._local.steps())
        now = time.monotonic()
        for other in list(self._others.values()):
            if now - other.asked >= ASK_SECONDS:
                other.asked = now
                self._ask_steps(other)
            found |= other.steps
        return found

    def _ask_steps(self, other: _Other) -> None:
        began = time.monotonic()
        try:
            fields: Any = read_json(other.ask(_STEPS, STEPS_SECONDS), 1 << 20)
            other.clock.learn(float(fields["now"]), time.time(), time.monotonic() - began)
            other.steps = {int(rank): (int(step), float(at)) for rank, (step, at) in fields["steps"].items()}
            other.world, lost = int(fields["world"]), int(fields["lost"])
        except (ProofError, ValueError, KeyError, TypeError, AttributeError):
            self._drop(other)
            return
        self._lost = self._lost or lost > other.lost
        other.lost = lost

    def recordings(self) -> Mapping[int, Recording]:
        """With times by this host's clock, as who comes last in a call is seen by them."""
        found = self._local.recordings()
        for other, sights in self._elsewhere(_SIGHTS):
            found |= {rank: other.clock.ours(one.recording) for rank, one in sights.items() if one.recording}
        return found

    def sights(self, *, all_stacks: bool) -> Mapping[int, RankSight]:
        asked: list[tuple[_Other, dict[int, RankSight]]] = []
        question = _STACKS if all_stacks else _SIGHTS
        asking = threading.Thread(target=lambda: asked.extend(self._elsewhere(question)), name="other hosts")
        asking.start()
        found = self._local.sights(all_stacks=all_stacks)
        asking.join()
        for _, sights in asked:
            found |= sights
        return found

    def _elsewhere(self, question: bytes) -> list[tuple[_Other, dict[int, RankSight]]]:
        """All hosts are asked at once: a look takes each of them some tenths of a second, a silent one much longer."""
        others = list(self._others.values())
        if not others:
            return []
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(others)), thread_name_prefix="asking") as pool:
            return list(zip(others, pool.map(lambda other: self._ask_sights(other, question), others), strict=True))

    def _ask_sights(self, other: _Other, question: bytes) -> dict[int, RankSight]:
        try:
            return sights_from_json(other.ask(question, SIGHTS_SECONDS), time.time())
        except (ProofError, SightsError):
            self._drop(other)
            return {}

    def _drop(self, other: _Other) -> None:
        self._silent[other.life] = other.host
        self._others.pop(other.life, None)
        other.over.set()


class Reporting:
    """A host without rank 0: answers the first watcher's questions, on a thread of its own."""

    def __init__(self, local: LocalRanks, address: tuple[str, int], say: Callable[[str], None]) -> None:
        self._local = local
        self._address = address
        self._say = say
        self._over = threading.Event()
        self._said = False
        self._life = secrets.token_hex(8)
        self.connected = False
        """While it is, the first watcher speaks for this host, too."""
        self._thread = threading.Thread(target=self._run, name="first watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(SIGHTS_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with socket.create_connection(self._address, DIAL_SECONDS) as connection:
                    self._serve(dial(connection, _key(), _parties(), time.monotonic() + DIAL_SECONDS))
            except (OSError, ProofError) as error:
                if not self._said and not self.connected:
                    self._said = True
                    self._say(phrases.meeting_failed(f"{self._address[0]}:{self._address[1]}", str(error)))
            self.connected = False
            self._over.wait(AGAIN_SECONDS)

    def _serve(self, link: ProvenSocket) -> None:
        hello = {"host": self._local.host, "life": self._life, "ranks": self._local.numbers}
        link.send(json.dumps(hello).encode(), time.monotonic() + STEPS_SECONDS)
        self.connected = True
        while not self._over.is_set():
            question = link.receive(64, time.monotonic() + IDLE_SECONDS)
            link.send(self._answer(question), time.monotonic() + SIGHTS_SECONDS)

    def _answer(self, question: bytes) -> bytes:
        with self._local.lock:
            if question != _STEPS:
                return sights_to_json(self._local.sights(all_stacks=question == _STACKS))
            steps = {str(rank): one for rank, one in self._local.steps().items()}
            counted = {"steps": steps, "world": self._local.world, "lost": self._local.lost, "now": time.time()}
            return json.dumps(counted).encode()


def _family(host: str) -> socket.AddressFamily:
    with contextlib.suppress(OSError):
        return socket.AddressFamily(socket.getaddrinfo(host, None)[0][0])
    return socket.AF_INET
