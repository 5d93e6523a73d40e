"""Attacks every listening socket of a small running job with mutated bytes; the job must finish its steps.

The sockets are not named here: they are read from the processes of the job. Every connection has a deadline, and there
are never more than a few at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fuzz.callers import KeyedCaller, raised
from fuzz.mutation import mutated
from fuzz.wire_targets import wire_targets
from helpers import listeners
from helpers.ports import free_range
from helpers.waiting import wait_until
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.listening import listening_sockets
from lockstep.runtime.processes import descendants
from lockstep.transports.control.addresses import Address
from lockstep.transports.quiet_grpc import grpc

STEP_SECONDS: Final = 0.02
CONNECT_SECONDS: Final = 2.0
READ_SECONDS: Final = 0.05
START_SECONDS: Final = 60.0
END_SECONDS: Final = 60.0
GROWTH_BYTES: Final = 64 << 20
ATTACKERS: Final = 4

_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_GET: Final = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer 00\r\n\r\n"
_SETTINGS: Final = bytes.fromhex("000000040000000000")
_UCX: Final = bytes.fromhex("1234567890abcdef") + bytes(45)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Door:
    """One listening socket: an address of IP, or the name of an abstract unix socket."""

    place: tuple[str, int] | str

    def connect(self) -> socket.socket:
        if isinstance(self.place, tuple):
            host, port = self.place
            named = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            return socket.create_connection((named, port), timeout=CONNECT_SECONDS)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.settimeout(CONNECT_SECONDS)
        try:
            door.connect(self.place)
        except OSError:
            door.close()
            raise
        return door


def doors_of(pids: Sequence[int]) -> list[Door]:
    """Where these processes listen, according to the kernel."""
    found: set[tuple[str, int] | str] = {(one.address, one.port) for one in listening_sockets(pids)}
    found.update(name.decode() for name in listeners.doors_of(pids))
    return [Door(place) for place in sorted(found, key=str)]


def seeds() -> list[bytes]:
    """What a stranger might send: our own messages, the beginnings of known protocols, and requests by HTTP/2."""
    own = [seed for target in wire_targets() for seed in target.seeds]
    preface = _HTTP2 + _SETTINGS
    calls = [preface + _call(f"/lockstep.{name}", body) for name in _METHODS for body in own[:20]]
    return [*own, preface, _HTTP2, _UCX, _GET, b'{"rank": 1, "world": 2, "port": 1}\n', *calls]


_METHODS: Final = ("Monitor/Describe", "Monitor/Snapshot", "Task/Link", "Task/Data", "Task/Snapshot", "Task/Witness")


def _call(path: str, body: bytes) -> bytes:
    """One gRPC request: HEADERS without compression of names, then DATA."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a"), ("te", "trailers"))
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in (*fields, ("content-type", "application/grpc"))
    )
    message = b"\x00" + len(body).to_bytes(4, "big") + body
    return _frame(1, 4, block) + _frame(0, 1, message)


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + payload


Visit = Callable[[Door], None]


class _Attacker(threading.Thread):
    """One connection after another, until the deadline."""

    def __init__(self, doors: Sequence[Door], deadline: float, visit: Visit) -> None:
        super().__init__(name="attacker", daemon=True)
        self._doors, self._deadline, self._visit = doors, deadline, visit
        self.made = 0
        self.refused: dict[Door, int] = {}

    def run(self) -> None:
        for door in itertools.cycle(self._doors):
            if time.monotonic() >= self._deadline:
                return
            try:
                self._visit(door)
                self.made += 1
            except (OSError, grpc.RpcError):
                self.refused[door] = self.refused.get(door, 0) + 1


def as_stranger(given: Sequence[bytes], chance: random.Random) -> Visit:
    """Bytes without a word about who sends them."""

    def visit(door: Door) -> None:
        with door.connect() as connection, contextlib.suppress(OSError):  # it may hang up on us at any time
            for _ in range(chance.choice((0, 1, 1, 2, 4))):
                connection.sendall(mutated(chance, given)[: 1 << 16])
            connection.settimeout(READ_SECONDS)
            connection.recv(65536)

    return visit


def as_member(caller: KeyedCaller, chance: random.Random) -> Visit:
    """Calls with the key, where a port takes calls."""

    def visit(door: Door) -> None:
        if isinstance(door.place, tuple):
            caller.visit(str(Address(*door.place)), chance)

    return visit


def visited(doors: Sequence[Door], seconds: float, visits: Sequence[Visit]) -> list[_Attacker]:
    """One attacker for each way to visit; they have begun, and end by themselves after this time."""
    deadline = time.monotonic() + seconds
    begun = [_Attacker(doors, deadline, visit) for visit in visits]
    for attacker in begun:
        attacker.start()
    return begun


def strangers(seed: int, count: int = ATTACKERS) -> list[Visit]:
    given = seeds()
    return [as_stranger(given, random.Random(f"{seed} live {number}")) for number in range(count)]


def attack(seed: int, seconds: float, say: Say, protocol: str = "auto") -> list[str]:
    """Run a job of one server and two workers for about ``seconds`` under attack; what went wrong, in sentences."""
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        steps = max(200, int(seconds / STEP_SECONDS))
        with DrillCluster(ClusterShape(1, 2), Path(folder)) as cluster:
            metrics = f"0.0.0.0:{free_range(len(cluster.shape.tasks()))[0]}"
            for task in cluster.shape.tasks():
                plan = cluster.plan(task, steps=steps, step_seconds=STEP_SECONDS, protocol=protocol)
                cluster.start(dataclasses.replace(plan, metrics_port=metrics))
            return _attacked(cluster, Path(folder), seed, seconds, say)


def _attacked(cluster: DrillCluster, folder: Path, seed: int, seconds: float, say: Say) -> list[str]:
    if not within(START_SECONDS, lambda: (folder / "training").exists()):
        return [f"the job did not begin to train within {START_SECONDS:g} s", *_last_words(folder)]
    pids = [
        below for process in cluster._processes for below in (process.pid, *(d.pid for d in descendants(process.pid)))
    ]
    doors = doors_of(pids)
    before = {pid: _resident(pid) for pid in pids}
    members = [as_member(KeyedCaller(seeds(), folder), random.Random(f"{seed} keyed {n}")) for n in range(2)]
    begun = visited(doors, seconds, [*strangers(seed), *members])
    problems = []
    within(seconds, lambda: any(code is not None for code in cluster.exit_codes()))
    grown = {pid: _resident(pid) - before[pid] for pid in pids}
    for attacker in begun:
        attacker.join(CONNECT_SECONDS * 2 + seconds)
    ended = within(seconds + END_SECONDS, lambda: all(code is not None for code in cluster.exit_codes()))
    codes = cluster.exit_codes()
    made = [attacker.made for attacker in begun]
    worst = max(grown.values(), default=0)
    say(
        f"{'live ports':<32} {sum(made):>9} connections to {len(doors)} sockets, {sum(made[ATTACKERS:])} of them with "
        f"the key, grew by {worst / (1 << 20):.1f} MiB, exit codes {codes}"
    )
    if not all(made) or not doors:
        problems.append("nothing was attacked")
    if not ended or any(codes):
        problems += [f"the job did not finish its steps: exit codes {codes}", *_last_words(folder)]
    problems += [one for log in sorted((folder / "logs").iterdir()) for one in raised(log.read_text(errors="replace"))]
    if worst > GROWTH_BYTES:
        problems.append(f"a process grew by {worst >> 20} MiB")
    return problems


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it came true in time."""
    try:
        return wait_until(condition, seconds, "it")
    except AssertionError:
        return False


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _last_words(folder: Path) -> list[str]:
    return [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in sorted((folder / "logs").iterdir())]
