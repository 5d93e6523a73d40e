"""Attacks a task with the job's key: mutated messages inside of TLS, of calls and links, and after every proof.

What listens is a process with all services of a task (``stand.py``). It must still serve a member that keeps the rules,
have no thread that ended with an exception, and hold no more memory, threads or descriptors than before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import psutil

from fuzz.callers import CALL_SECONDS, KeyedCaller, raised
from fuzz.live import GROWTH_BYTES, Say, seeds, within
from fuzz.mutation import mutated
from helpers.programs import Program
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import Envelope, GradientNote, Grant, Hello, Ticket, TransportAddress
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.security.proof import Dialer, Parties, ProofError
from lockstep.security.wire import dial
from lockstep.transports.base import PeerAddress
from lockstep.transports.control.channels import open_channel, open_data_channel
from lockstep.transports.control.codec import WireError, decode_envelopes, encode, encode_note, join_envelopes
from lockstep.transports.control.monitor_client import describe
from lockstep.transports.control.server import method_path
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grpc.chunks import CHUNK
from lockstep.transports.landing import FIRST, LAST, LOAN
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.shm import frames as shm
from lockstep.transports.shm.handshake import door_key, greet, introduce
from lockstep.transports.shm.host import make_place, unpack_place
from lockstep.transports.shm.listener import connect
from lockstep.transports.shm.memory import make_memory_file
from lockstep.transports.shm.signal_socket import Signals
from lockstep.transports.shm.tokens import make_tokens
from lockstep.transports.stream.frames import (
    FrameKind,
    Header,
    StreamHello,
    pack,
    pack_hello,
    unpack,
    unpack_proof,
)
from lockstep.transports.tcp import frames as tcp
from lockstep.transports.tcp import opening as tcp_opening
from lockstep.version import __version__

SETTLE_SECONDS: Final = 60.0
START_SECONDS: Final = 60.0
ATTACKERS: Final = 3
WARM_UP: Final = 5
"""Rounds of each kind of visit, by the rules, before anything is measured."""
SPARE: Final = 12
"""Threads and descriptors that may come and go."""
_PROVEN: Final = (OSError, EOFError, ProofError, FrameError, WireError, grpc.RpcError, StopIteration)
"""How a visit may end when the other side has had enough."""
_WORKERS: Final = 8
_NOTE: Final = encode_note(GradientNote(1, 2, 3))

Change = Callable[[bytes], bytes]


class Link:
    """A control link to the stand, as a member of the job opens it, and what the stand says on it."""

    def __init__(self, address: str, transport: str, first: Change = lambda data: data) -> None:
        self.task = str(worker(secrets.randbelow(_WORKERS)))
        self.life = secrets.randbits(62) + 1
        self._sent: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = open_channel(address)
        published = {"grpc+shm": make_place().pack(), "grpc+tcp": b"127.0.0.1:1"}.get(transport, b"plain://127.0.0.1:1")
        hello = Hello(self.task, self.life, 0, __version__, (TransportAddress(transport, published),))
        self.say(first(join_envelopes([encode(Envelope(0, self.task, self.life, hello))])))
        call = self._channel.stream_stream(method_path("Task", "Link"))
        self._heard = call(iter(self._sent.get, None), timeout=CALL_SECONDS)

    def say(self, data: bytes) -> None:
        self._sent.put(data)

    def answers(self) -> Iterator[Any]:
        for data in self._heard:
            for envelope in decode_envelopes(data):
                yield envelope.message

    def greeted(self) -> tuple[Hello, Ticket]:
        """Whom it has reached, and where it may write."""
        answers = self.answers()
        hello = next(answers)
        assert isinstance(hello, Hello), hello
        return hello, next(one.ticket for one in answers if isinstance(one, Grant))

    def close(self) -> None:
        self._sent.put(None)
        self._heard.cancel()
        self._channel.close()


class Stream:
    """A data stream that has proven itself."""

    def __init__(self, link: Link, stand: Hello) -> None:
        address = stand.transports[0].address.decode()
        key = chosen_key()
        assert key is not None
        parties = Parties(
            purpose="Task.Data", dialer=link.task, acceptor=stand.task, version=__version__, dialer_life=link.life,
            acceptor_life=stand.incarnation, acceptor_address=address,
        )  # fmt: skip
        dialer = Dialer(key.sub(Purpose.DATA), parties)
        self._sent: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = open_data_channel(address)
        self.say(pack_hello(StreamHello(link.task, link.life, stand.incarnation, dialer.nonce)))
        call = self._channel.stream_stream(method_path("Task", "Data"))
        self.heard = call(iter(self._sent.get, None), timeout=CALL_SECONDS)
        self.say(pack(Header(FrameKind.PROOF), dialer.answer(unpack_proof(next(self.heard)))[0]))
        assert unpack(next(self.heard))[0].kind == FrameKind.HELLO

    def say(self, data: bytes) -> None:
        self._sent.put(data)

    def close(self) -> None:
        self._sent.put(None)
        self.heard.cancel()
        self._channel.close()


def _chunks(ticket: Ticket) -> list[bytes]:
    head = Header(CHUNK, FIRST | LAST, len(_NOTE), 1, ticket.region, ticket.key, total=64)
    return [
        pack(head._replace(flags=FIRST | LAST | LOAN), _NOTE, bytes(64)),
        pack(head, _NOTE, bytes(64)),
        pack(head._replace(flags=FIRST, note_bytes=0), bytes(32)),
        pack(head._replace(flags=LAST, offset=32), _NOTE, bytes(32)),
        pack(Header(FrameKind.RELEASE, transfer=1)),
        pack(Header(FrameKind.GOODBYE)),
    ]


class Door:
    """A signal socket of shared memory that has proven itself, with one region announced."""

    def __init__(self, link: Link, stand: Hello) -> None:
        self._kept = contextlib.ExitStack()
        place = unpack_place(stand.transports[0].address)
        descriptor, self.tokens = make_tokens()
        me = introduce(link.task, link.life, descriptor, self._kept)
        self.signals: Signals = connect(place, stand.task)
        self._kept.callback(self.signals.close)
        self.region = make_memory_file(4096, "a region")
        self._kept.callback(os.close, self.region)
        peer = PeerAddress(stand.task, stand.incarnation, stand.transports[0].address)
        greet(self.signals, me, peer, door_key(place, chosen_key()), time.monotonic() + CALL_SECONDS)
        self.tokens.lay_out(1)
        self.signals.send(shm.pack_region(1, 4096), [self.region])

    def heard(self) -> bytes:
        frame = self.signals.receive_within(CALL_SECONDS)
        return b"" if frame is None else frame[0]

    def close(self) -> None:
        self._kept.close()


def _signals(ticket: Ticket) -> list[bytes]:
    lent = shm.Offer(shm.LOAN, 1, 1, 1, 0, 64, 0, bytes(8), 0, _NOTE)
    written = lent._replace(flags=0, target=ticket.region, key=ticket.key)
    return [
        shm.pack_offer(lent),
        shm.pack_offer(written),
        shm.pack_region(2, 4096),
        shm.pack_number(shm.SignalKind.FORGET, 1),
        shm.pack_number(shm.SignalKind.DONE, 1),
        shm.pack_number(shm.SignalKind.DROPPED, 1),
        shm.pack_fault("a rule"),
    ]


class Line:
    """A connection of ``grpc+tcp`` that has proven itself."""

    def __init__(self, link: Link, stand: Hello) -> None:
        address, key = stand.transports[0].address.decode(), chosen_key()
        assert key is not None
        purpose = tcp_opening.LinePurpose(stand.incarnation, link.life, 0, 1)
        parties = tcp_opening.parties_of(purpose, link.task, link.life, stand.task, address)
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), CALL_SECONDS)
        deadline = time.monotonic() + CALL_SECONDS
        proven = dial(self.socket, key.sub(Purpose.DATA), parties, deadline)
        assert proven.receive(2048, deadline) == b""
        self.socket.settimeout(CALL_SECONDS)

    def heard(self) -> bytes:
        return self.socket.recv(tcp.HEAD_BYTES, socket.MSG_WAITALL)

    def close(self) -> None:
        self.socket.close()


def _lines(ticket: Ticket) -> list[bytes]:
    head = tcp.ChunkHead(tcp.LineFrame.CHUNK, FIRST | LAST, len(_NOTE), 64, 1, ticket.region, ticket.key, total=64)
    return [
        tcp.HEAD.pack(*head._replace(flags=FIRST | LAST | LOAN)) + _NOTE + bytes(64),
        tcp.HEAD.pack(*head) + _NOTE + bytes(64),
        tcp.HEAD.pack(*head._replace(flags=FIRST, note_bytes=0, nbytes=32)) + bytes(32),
        tcp.HEAD.pack(*head._replace(flags=LAST | tcp.STRIPED, offset=32, nbytes=32)) + _NOTE + bytes(32),
        tcp.pack_release(1),
        tcp.pack_fault("a rule"),
        tcp.pack_goodbye(),
    ]


class Visits:
    """All kinds of visits; each returns whether the stand behaved as it should towards a member that keeps the rules,
    which only counts without a ``chance`` for changes."""

    def __init__(self, addresses: dict[str, str], folder: Path) -> None:
        self._grpc, self._shm, self._tcp = (addresses[name] for name in ("grpc", "grpc+shm", "grpc+tcp"))
        self._caller = KeyedCaller(seeds(), folder)
        self._joined = self._caller.joined
        self.kinds: dict[str, Callable[[random.Random | None], bool]] = {
            "inside TLS": lambda chance: self._caller.inside_tls(self._grpc, chance),
            "calls": self._calls,
            "first message of a link": self._first_message,
            "messages of a link": self._messages,
            "frames of a stream": self._frames,
            "signals at the door": self._door,
            "frames of a connection": self._line,
        }

    def _calls(self, chance: random.Random | None) -> bool:
        if chance is None:
            return describe(self._grpc, CALL_SECONDS).task_address == self._grpc
        self._caller.calls(self._grpc, chance)
        return True

    def _first_message(self, chance: random.Random | None) -> bool:
        def change(data: bytes) -> bytes:
            return data if chance is None else mutated(chance, [data, *self._joined])

        with contextlib.closing(Link(self._grpc, "grpc", change)) as link:
            return isinstance(next(link.answers()), Hello)

    def _messages(self, chance: random.Random | None) -> bool:
        with contextlib.closing(Link(self._grpc, "grpc")) as link:
            link.greeted()
            for _ in range(0 if chance is None else 6):
                assert chance is not None
                link.say(mutated(chance, self._joined))
            return True

    def _frames(self, chance: random.Random | None) -> bool:
        with contextlib.closing(Link(self._grpc, "grpc")) as link:
            stand, ticket = link.greeted()
            with contextlib.closing(Stream(link, stand)) as stream:
                given = _chunks(ticket)
                if chance is None:
                    stream.say(given[0])
                    return unpack(next(stream.heard))[0].kind == FrameKind.RELEASE
                for _ in range(chance.randint(1, 6)):
                    stream.say(mutated(chance, given))
                stream.say(given[-1])
                return len(list(stream.heard)) >= 0

    def _door(self, chance: random.Random | None) -> bool:
        with contextlib.closing(Link(self._shm, "grpc+shm")) as link:
            stand, ticket = link.greeted()
            with contextlib.closing(Door(link, stand)) as door:
                given = _signals(ticket)
                if chance is None:
                    door.signals.send(given[0])
                    return door.heard() == shm.pack_number(shm.SignalKind.DONE, 1)
                for _ in range(chance.randint(1, 6)):
                    sent = [door.region] * chance.choice((0, 0, 1, 2)) + [0] * chance.choice((0, 0, 0, 1))
                    door.signals.send(mutated(chance, given)[: shm.MAX_FRAME_BYTES], sent)
                    door.tokens.lay_out(1)
                door.signals.send(bytes([shm.SignalKind.GOODBYE]))
                while door.heard():
                    pass
        return True

    def _line(self, chance: random.Random | None) -> bool:
        with contextlib.closing(Link(self._tcp, "grpc+tcp")) as link:
            stand, ticket = link.greeted()
            with contextlib.closing(Line(link, stand)) as line:
                given = _lines(ticket)
                if chance is None:
                    line.socket.sendall(given[0])
                    return line.heard() == tcp.pack_release(1)
                for _ in range(chance.randint(1, 6)):
                    line.socket.sendall(mutated(chance, given))
                line.socket.sendall(given[-1])
                line.socket.shutdown(socket.SHUT_WR)
                while line.heard():
                    pass
        return True


class _Member(threading.Thread):
    """One visit after another, until the deadline."""

    def __init__(self, visits: Visits, chance: random.Random, deadline: float, made: dict[str, int]) -> None:
        super().__init__(name="member", daemon=True)
        self._visits, self._chance, self._deadline, self._made = visits, chance, deadline, made
        self.problems: list[str] = []

    def run(self) -> None:
        for kind in itertools.cycle(self._visits.kinds):
            if time.monotonic() > self._deadline:
                return
            try:
                self._visits.kinds[kind](self._chance)
            except _PROVEN:
                pass
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                self.problems.append(f"a visit of {kind} ended with {error!r}")
                return
            self._made[kind] += 1


def attack_member(seed: int, seconds: float, say: Say) -> list[str]:
    """Members misbehave for a while, then one keeps the rules; what went wrong, in sentences."""
    tests = str(Path(__file__).parents[1])
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder,
        Program([sys.executable, "-m", "fuzz.stand"], {"PYTHONPATH": tests}) as stand,
    ):
        if not within(START_SECONDS, lambda: "\n" in stand.stdout() or not stand.running()) or not stand.running():
            return [f"the task did not start: {stand.stderr()[-1500:]}"]
        visits = Visits(json.loads(stand.stdout()), Path(folder))
        return _misused(stand, visits, seed, seconds, say)


def _misused(stand: Program, visits: Visits, seed: int, seconds: float, say: Say) -> list[str]:
    problems = [problem for _ in range(WARM_UP) for problem in _by_the_rules(visits)]
    if problems:
        return [*problems, stand.stderr()[-1500:]]
    process = psutil.Process(stand.pid)
    before = process.memory_info().rss
    idle = (process.num_threads(), process.num_fds())
    made = dict.fromkeys(visits.kinds, 0)
    deadline = time.monotonic() + seconds
    members = [_Member(visits, random.Random(f"{seed} member {n}"), deadline, made) for n in range(ATTACKERS)]
    for member in members:
        member.start()
    for member in members:
        member.join(seconds + 3 * CALL_SECONDS)
        problems += [*member.problems, *(["a visit did not end"] if member.is_alive() else [])]
    if not stand.running():
        return [f"the task ended: {stand.stderr()[-1500:]}"]
    problems += _by_the_rules(visits)

    def settled() -> bool:
        return process.num_threads() <= idle[0] + SPARE and process.num_fds() <= idle[1] + SPARE

    if not within(SETTLE_SECONDS, settled):
        problems.append(f"it holds {process.num_threads()} threads and {process.num_fds()} descriptors, not {idle}")
    grown = max(0, process.memory_info().rss - before)
    for kind, count in made.items():
        say(f"{'member: ' + kind:<32} {count:>9} visits")
    say(f"{'member':<32} {sum(made.values()):>9} visits, grew by {grown / (1 << 20):.1f} MiB")
    problems += [f"no visit of the kind {kind} was made" for kind, count in made.items() if not count]
    if grown > GROWTH_BYTES:
        problems.append(f"the task grew by {grown >> 20} MiB")
    return problems + raised(stand.stderr())


def _by_the_rules(visits: Visits) -> list[str]:
    problems = []
    for kind, visit in visits.kinds.items():
        try:
            if not visit(None):
                problems.append(f"a member that keeps the rules gets a wrong answer: {kind}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            problems.append(f"a member that keeps the rules is not served: {kind}: {error!r}")
    return problems
