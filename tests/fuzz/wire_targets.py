"""Parsers of what arrives over a socket: control messages, frames of the data paths, answers of other tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from diagnose.faulty import frozen
from fuzz.engine import Target
from helpers.snapshots import W0, healthy
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.fields import SnapshotError
from lockstep.diagnose.monitor_view import read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.verdict import ReportError, read_diagnosis
from lockstep.diagnose.witness import read_statement
from lockstep.doctor.facts import read_shared, read_visits
from lockstep.doctor.listening import Inbox
from lockstep.foreign import JsonError, read_json
from lockstep.library import store_meeting
from lockstep.protocol.core import messages
from lockstep.protocol.core.messages import Description, Envelope, GradientNote, Ticket, VersionNote
from lockstep.runtime.monitor.task_process import KeeperNews, TaskProcess
from lockstep.runtime.startup import rendezvous
from lockstep.runtime.startup.start_facts import read_start_facts
from lockstep.security import wire
from lockstep.security.certificates import certificates_for
from lockstep.security.key import Key
from lockstep.security.proof import Parties, ProofError, Refusal, new_nonce
from lockstep.security.tls import PrivateEnds
from lockstep.transports.auto import tickets
from lockstep.transports.base import PeerAddress, TransportError
from lockstep.transports.control import codec
from lockstep.transports.control.addresses import Address
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants
from lockstep.transports.grpc.chunks import CHUNK
from lockstep.transports.grpc.receiving import ChunkLanding
from lockstep.transports.landing import FIRST, LAST, WHOLE
from lockstep.transports.memory import HostRegion
from lockstep.transports.net import control as net
from lockstep.transports.net.links import pack_ticket, unpack_ticket
from lockstep.transports.shm import frames as shm_frames
from lockstep.transports.shm.host import make_place, unpack_place
from lockstep.transports.stream import frames as stream_frames
from lockstep.transports.tcp import frames as tcp_frames
from lockstep.transports.tcp.line import Line, _Pieces
from lockstep.transports.tcp.opening import LinePurpose, read_purpose
from lockstep.transports.tcp.receiving import NOWHERE, LineLanding

TASK = "/job:worker/replica:0/task:0"


def wire_targets() -> Iterator[Target]:
    yield from _control()
    yield from _streams()
    yield from _shared_memory()
    yield from _connections()
    yield from _proofs()
    yield from _lines()
    yield from _auto()
    yield from _answers()


def made_up(kind: type, chance: random.Random) -> Any:
    """A message with plausible values in all fields, by their types."""
    hints = get_type_hints(kind)
    return kind(**{field.name: _value(hints[field.name], chance) for field in dataclasses.fields(kind)})


def _value(hint: Any, chance: random.Random) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], chance) for _ in range(chance.randint(1, 3)))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return made_up(hint, chance)
    if issubclass(hint, Enum):
        return chance.choice(list(hint))
    plain = {str: TASK, bytes: b"bytes", bool: True, float: 0.1, int: chance.randint(0, 100)}
    return plain[hint]


def _control() -> Iterator[Target]:
    chance = random.Random(1)
    envelopes = [
        codec.encode(Envelope(1, TASK, 2, made_up(kind, chance))) for kind in get_args(messages.Message) for _ in "12"
    ]
    errors = (codec.WireError,)
    yield Target("control: Envelope", codec.decode, envelopes, errors)
    joined = [codec.join_envelopes(chance.choices(envelopes, k=3)) for _ in range(20)]
    yield Target("control: Envelopes", codec.decode_envelopes, joined, errors)
    described = [codec.encode_description(made_up(Description, chance)) for _ in range(4)]
    yield Target("control: Description", codec.decode_description, described, errors)
    notes = [codec.encode_note(GradientNote(1, 2, 3)), codec.encode_note(VersionNote(4, 5))]
    yield Target("control: note", codec.decode_note, notes, errors)
    yield Target("control: SnapshotReply", codec.decode_snapshot, [codec.encode_snapshot(b"{}")], errors)
    asked = [codec.encode_witness_request(TASK)]
    yield Target("control: WitnessRequest", codec.decode_witness_request, asked, errors)


def _streams() -> Iterator[Target]:
    pack, header = stream_frames.pack, stream_frames.Header
    frames = [
        stream_frames.pack_hello(stream_frames.StreamHello(TASK, 1, 2, new_nonce())),
        stream_frames.pack_refusal(Refusal.MALFORMED),
        pack(header(stream_frames.FrameKind.PROOF), new_nonce()),
        stream_frames.pack_fault("a rule"),
        pack(header(stream_frames.FrameKind.GOODBYE)),
        pack(header(16), b"metadata of an agent"),
        pack(header(18, transfer=1, region=2, total=64, offset=1 << 40)),
    ]
    yield Target("stream: frame", stream_frames.unpack, frames, (FrameError,))
    yield Target("stream: hello", stream_frames.unpack_hello, frames, (FrameError, ProofError))
    yield Target("stream: proof", stream_frames.unpack_proof, frames, (FrameError, ProofError))
    peer = PeerAddress(TASK, 1, b"")
    grants = Grants()
    ticket = grants.give("grpc", HostRegion(1, memoryview(bytearray(4096)), None, grants.withdraw), peer)
    note = codec.encode_note(GradientNote(1, 2, 3))
    chunk = header(CHUNK, transfer=1, region=ticket.region, key=ticket.key, total=64)
    chunks = [
        pack(chunk._replace(flags=FIRST | LAST, note_bytes=len(note)), note, bytes(64)),
        pack(chunk._replace(flags=FIRST), bytes(32)),
        pack(chunk._replace(flags=LAST, note_bytes=len(note), offset=32), note, bytes(32)),
    ]

    def land(data: bytes) -> None:
        landing = ChunkLanding(grants, peer)
        landing.take(*stream_frames.unpack(chunks[1]))
        landing.take(*stream_frames.unpack(data))

    yield Target("grpc: chunk", land, chunks, (FrameError,))


def _shared_memory() -> Iterator[Target]:
    offer = shm_frames.Offer(0, 1, 2, 3, 0, 64, 4, b"12345678", 0, b"note")
    number = shm_frames.pack_number(shm_frames.SignalKind.DONE, 7)
    claim = shm_frames.pack_claim(shm_frames.DoorClaim(TASK, 1, 2, True, new_nonce()))
    errors = (FrameError,)
    yield Target("shm: offer", shm_frames.unpack_offer, [shm_frames.pack_offer(offer)], errors)
    yield Target("shm: region", shm_frames.unpack_region, [shm_frames.pack_region(1, 4096)], errors)
    yield Target("shm: number", shm_frames.unpack_number, [number], errors)
    yield Target("shm: claim", shm_frames.unpack_claim, [claim, shm_frames.pack_fault("a rule")], (ProofError,))
    yield Target("shm: address", unpack_place, [make_place().pack()], (ValueError,))


def _connections() -> Iterator[Target]:
    """Of ``grpc+tcp``: heads alone, what a connection is for, and whole chunks as they land from a socket."""
    peer = PeerAddress(TASK, 1, b"")
    grants = Grants()
    ticket = grants.give("grpc+tcp", HostRegion(1, memoryview(bytearray(4096)), None, grants.withdraw), peer)
    chunk = tcp_frames.ChunkHead(tcp_frames.LineFrame.CHUNK, FIRST, 0, 32, 1, ticket.region, ticket.key, total=64)
    heads = [
        tcp_frames.HEAD.pack(*head)
        for head in (chunk, chunk._replace(flags=LAST, offset=32), chunk._replace(flags=3, nbytes=64))
    ]
    others = [tcp_frames.pack_release(1), tcp_frames.pack_goodbye(), tcp_frames.pack_fault("a rule")[:48]]
    yield Target("tcp: head", tcp_frames.unpack_head, [*heads, *others], (FrameError,))
    purpose = LinePurpose(1 << 63, 7, 0, 2).pack().encode()
    yield Target("tcp: purpose", lambda data: read_purpose(data.decode(errors="replace")), [purpose], (ProofError,))

    def land(data: bytes) -> None:
        landing = LineLanding(grants, peer)
        for one in (heads[0], data):
            head = tcp_frames.unpack_head(one)
            whole = head.flags & WHOLE == WHOLE
            grant = landing.whole(head, head.nbytes) if whole else landing.begin(head, head.nbytes)
            ours, theirs = socket.socketpair(socket.AF_UNIX)
            with ours, theirs:
                theirs.sendall(bytes(min(head.nbytes, 4096)))
                line = object.__new__(Line)
                line.descriptor, line._in, line._sends = ours.fileno(), _Pieces(3), False
                if head.nbytes:
                    landing.receive(grant, line, NOWHERE, head.offset, head.nbytes)
            if not whole:
                landing.end(head, head.nbytes)

    yield Target("tcp: chunk", land, heads, (FrameError,))


def _proofs() -> Iterator[Target]:
    """Both ends of the proof on a plain socket: what the other one sends, from its first byte to its last."""
    key = bytes(32)
    parties = Parties(purpose="fuzz", dialer="a", acceptor="b", version="1")

    def heard(data: bytes, end: Callable[[socket.socket], object]) -> bytes:
        """What this end sends when it gets these bytes and then nothing more."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ProofError):
                end(ours)
            theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return theirs.recv(1 << 16)
        return b""

    def accepts(connection: socket.socket) -> object:
        return wire.accept(connection, key, lambda _claim: parties)

    def dials(connection: socket.socket) -> object:
        return wire.dial(connection, key, parties, time.monotonic() + 1)

    first = heard(b"", dials)
    opening = heard(first, accepts)
    assert first
    assert opening
    yield Target("proof: dialer", lambda data: heard(data, accepts), [first, first + opening])
    yield Target("proof: acceptor", lambda data: heard(data, dials), [opening, heard(opening, accepts)])

    with tempfile.TemporaryDirectory() as folder:
        ends = PrivateEnds(certificates_for(Key(key, Path(folder) / "key")))

    def shakes(connection: socket.socket) -> object:
        soon = time.monotonic() + 1
        return ends.accept(connection, soon, soon, lambda: None)

    def greets(connection: socket.socket) -> object:
        return ends.dial(connection, time.monotonic() + 1)

    hello = heard(b"", greets)
    yield Target("proof: dialer in TLS", lambda data: heard(data, shakes), [hello])
    yield Target("proof: acceptor in TLS", lambda data: heard(data, greets), [heard(hello, shakes)])


def _lines() -> Iterator[Target]:
    """What is said after a proof, as JSON; and what a monitor's own processes say."""
    greeting = {"rank": 1, "world": 2, "port": 1, "host": "127.0.0.1"}
    said = [json.dumps(one).encode() for one in (greeting, {"hosts": ["a:1", "b:2"]}, {"problem": "a reason"})]
    yield Target("rendezvous: line", rendezvous._read, said, (ProofError,))
    meeting = store_meeting.StoreMeeting(
        rank=0, world=2, store=Address("192.0.2.1", 1), name="0", timeout=1.0, version="1", key=None
    )
    entry = json.dumps({"host": "192.0.2.7", "port": 1, "store": "192.0.2.1", "version": "1"}).encode()
    read_entry = functools.partial(store_meeting._entry, meeting, 1)
    yield Target("rendezvous: entry of a store", read_entry, [entry], (rendezvous.RendezvousError,))
    methods: dict[str, Callable[..., object]] = {
        "describe": lambda: "a",
        "tcp": lambda nbytes: nbytes,
        "link": lambda **said: unpack_ticket(said),
    }
    packed = pack_ticket(Ticket("grpc", 1, 64, 0, b"12345678"))
    calls = [{"call": "describe", "with": {}}, {"call": "tcp", "with": {"nbytes": 1}}, {"call": "link", "with": packed}]
    asked = [json.dumps(call).encode() for call in calls]
    yield Target("net: call", lambda data: net._answer(data, methods, ()), asked)
    news = [json.dumps(one).encode() for one in ({"started": 1}, {"exited": -9}, {"failed": "a"}, {"stuck": [1, 2]})]

    def take_news(data: bytes) -> None:
        keeper = object.__new__(TaskProcess)
        keeper.news = KeeperNews()
        keeper._on_news(read_json(data, 4096))

    yield Target("monitor: news of its reaper", take_news, news, (JsonError,))


def _auto() -> Iterator[Target]:
    packed = tickets.pack_addresses([("grpc", b"127.0.0.1:1"), ("grpc+shm", make_place().pack())])
    yield Target("auto: addresses", tickets.unpack_addresses, [packed], (ValueError,))
    every = [Ticket("grpc", 1, 64, 0, b"12345678"), Ticket("grpc+shm", 2, 64, 0, b"12345678")]
    key = tickets.pack_tickets(64, every).key

    def find(data: bytes) -> None:
        tickets.ticket_for("grpc+shm", Ticket("auto", 0, 64, 0, data))

    yield Target("auto: ticket", find, [key], (TransportError,))


def _answers() -> Iterator[Target]:
    cluster = healthy()
    views = [json.dumps(fields).encode() for fields in cluster.tasks.values()]
    monitors = [json.dumps(fields).encode() for fields in cluster.monitors.values()]
    yield Target("snapshot of a task", read_task, views, (SnapshotError,))
    yield Target("snapshot of a monitor", read_monitor, monitors, (SnapshotError,))
    said = {"heard": True, "reach": "mute", "absent": False, "monitor": cluster.monitor(W0), "task": cluster.task(W0)}
    yield Target("statement of a witness", read_statement, [json.dumps(said).encode()])
    report = analyse(frozen().evidence()).to_json()
    yield Target("report.json", read_diagnosis, [report], (ReportError,))
    yield from _of_doctors()


def _of_doctors() -> Iterator[Target]:
    start = {"task": TASK, "ps_hosts": ["a:1"], "worker_hosts": ["b:1", "c:2"], "version": "1", "settings": {"a": "b"}}
    visit = {
        **dict.fromkeys(
            ("visitor", "host", "address", "words", "task", "phase", "process", "version", "other_port"), "a"
        ),
        **{"phase_seconds": 1.5, "job": 3, "answer": "mute"},
    }
    port = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "provider": "p", "gids": ["a"]}
    shared = {"rdma": [port], "data": {"path": "/d", "files": 3, "digest": "ab"}, "findings": []}
    told = json.dumps({"start": start, "visits": [visit], "shared": shared, "done": True}).encode()

    def tell(data: bytes) -> None:
        inbox = Inbox()
        inbox.take(data)
        for one in inbox.told().values():
            read_start_facts(one.get("start"))
            read_visits(one.get("visits"))
            read_shared(one.get("shared"))

    yield Target("doctor: report of another", tell, [told])
