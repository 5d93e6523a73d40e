"""Attacks two servers that are not part of a running job: rank 0 of a rendezvous, and ``lockstep net --serve``.

Strangers send bytes, and callers with the key send mutated lines after their proof. Run as a program with a port and
a number of seconds, this module is rank 0.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from fuzz.callers import raised
from fuzz.live import END_SECONDS, GROWTH_BYTES, Door, Say, Visit, strangers, visited, within
from fuzz.mutation import mutated
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Program
from lockstep.protocol.core.messages import Ticket
from lockstep.runtime.startup.rendezvous import RendezvousSpec, meet
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Key, Purpose
from lockstep.security.proof import Dialer, ProofError
from lockstep.security.wire import ProvenSocket, dial
from lockstep.transports.control.addresses import Address
from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.server import method_path
from lockstep.transports.net.control import BARE_GRPC, TCP, NetError, connect_proven, net_key, net_parties
from lockstep.transports.net.links import pack_ticket
from lockstep.transports.quiet_grpc import grpc

_LOOPBACK: Final = "127.0.0.1"
_WORLD: Final = 2
STRANGERS: Final = 2
ANSWER_SECONDS: Final = 10.0
WARM_UP_SECONDS: Final = 1.0


def _key() -> Key:
    key = chosen_key()
    assert key is not None
    return key


def _spec(port: int, seconds: float, rank: int = 0) -> RendezvousSpec:
    place = Address(_LOOPBACK, port)
    key = _key().sub(Purpose.RENDEZVOUS)
    return RendezvousSpec(rank=rank, world=_WORLD, address=place, timeout=seconds, version="fuzz", key=key)


def attack_rendezvous(seed: int, seconds: float, say: Say) -> list[str]:
    """Strangers and members come to rank 0 for a while, then the other rank does."""
    port, patience = free_port(), seconds + 2 * END_SECONDS
    tests = str(Path(__file__).parents[1])
    host = [sys.executable, "-m", "fuzz.servers", str(port), str(patience)]
    with Program(host, {"PYTHONPATH": tests}) as rank_0:
        member = _as_guest(_spec(port, patience), random.Random(f"{seed} guest"))
        problems = _attacked("rendezvous", rank_0, port, [*strangers(seed, STRANGERS), member], seconds, say)
        if problems:
            return problems
        try:
            guest = meet(_spec(port, END_SECONDS, rank=1), 1002, lambda _text: None)
            within(END_SECONDS, lambda: rank_0.stdout().endswith("\n"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            return [f"the ranks did not meet: {error!r}"]
        if rank_0.stdout().strip() != json.dumps(list(guest)):
            return [f"the ranks found different lists: {rank_0.stdout()} {guest}"]
    return []


def _as_guest(spec: RendezvousSpec, chance: random.Random) -> Visit:
    """A process with the key that sends anything but the greeting of the missing rank."""
    greeting = {"rank": 9, "world": _WORLD, "port": 1, "host": _LOOPBACK}
    given = [json.dumps(greeting | change).encode() for change in ({}, {"rank": 0}, {"world": 3}, {"host": "a"})]

    def visit(door: Door) -> None:
        line = mutated(chance, given)[:4096]
        with door.connect() as connection, contextlib.suppress(ProofError):
            parties = replace(spec, rank=1).parties("rank 1", secrets.randbits(63))
            proven = dial(connection, spec.key, parties, time.monotonic() + ANSWER_SECONDS)
            if not _is_missing_rank(line):
                proven.send(line, time.monotonic() + ANSWER_SECONDS)
                proven.receive(1 << 20, time.monotonic() + ANSWER_SECONDS)

    return visit


def _is_missing_rank(line: bytes) -> bool:
    try:
        greeting = json.loads(line)
        return bool(greeting["rank"] == 1)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def attack_net(seed: int, seconds: float, say: Say) -> list[str]:
    """Strangers and callers with the key come to a server of measurements for a while, then a real one does."""
    port = free_port()
    where = f"{_LOOPBACK}:{port}"
    with Program([*LOCKSTEP, "net", f"--serve={where}"]) as server:
        visits = [*strangers(seed, STRANGERS), _as_caller(random.Random(f"{seed} caller"))]
        problems = _attacked("net --serve", server, port, visits, seconds, say)
        if problems:
            return problems
        measure = [*LOCKSTEP, "net", where, "--max_size=4096", "--rounds=1", "--only=TCP", "--json=-"]
        done = subprocess.run(measure, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    return [] if done.returncode == 0 else [f"a measurement afterwards failed: {done.stderr[-1500:]}"]


def _calls() -> list[bytes]:
    ticket = pack_ticket(Ticket("grpc", 1, 64, 0, b"12345678"))
    link = {"transport": "grpc", "task": "/net/here", "incarnation": 1, "address": b"a:1".hex(), "answer_to": ticket}
    calls: list[tuple[str, dict[str, Any]]] = [
        *((name, {}) for name in ("describe", "cpu")),
        *(("prepare", {"transport": transport, "nbytes": 4096}) for transport in ("grpc", "grpc+shm", "auto")),
        *((name, {"nbytes": 4096}) for name in ("tcp", "bare_grpc", "bare_nixl")),
        *(("link", link), ("poll", {"on": True})),
    ]
    return [json.dumps({"call": name, "with": arguments}).encode() for name, arguments in calls]


def _as_caller(chance: random.Random) -> Visit:
    given = _calls()
    prepare = next(call for call in given if b"prepare" in call)
    link = next(call for call in given if b'"link"' in call)

    def visit(door: Door) -> None:
        assert isinstance(door.place, tuple)
        with contextlib.suppress(NetError, ProofError):
            caller = connect_proven(*door.place, "net", _key())
            with contextlib.closing(caller):
                kind = chance.randrange(4)
                if kind == 0:
                    _to_tcp(_ask(caller, {"call": "tcp", "with": {"nbytes": 4096}}), chance)
                elif kind == 1:
                    _to_bare_grpc(_ask(caller, {"call": "bare_grpc", "with": {"nbytes": 4096}}), chance)
                else:
                    lines = [prepare, mutated(chance, [link])] if kind == 2 else [mutated(chance, given) for _ in "123"]
                    for line in lines:
                        _say(caller, line)

    return visit


def _say(caller: ProvenSocket, line: bytes) -> bytes:
    caller.send(line, time.monotonic() + ANSWER_SECONDS)
    return caller.receive(1 << 20, time.monotonic() + ANSWER_SECONDS)


def _ask(caller: ProvenSocket, call: dict[str, Any]) -> Any:
    return json.loads(_say(caller, json.dumps(call).encode()))["result"]


def _to_tcp(port: int, chance: random.Random) -> None:
    """The bare socket that transports are compared with: a length, and as many bytes."""
    given = [(64).to_bytes(8, "little") + bytes(64), (4096).to_bytes(8, "little") + bytes(4096)]
    with contextlib.closing(connect_proven(_LOOPBACK, port, TCP, _key())) as proven, contextlib.suppress(OSError):
        for _ in range(3):
            proven.socket.sendall(mutated(chance, given))
        proven.socket.shutdown(socket.SHUT_WR)
        while proven.socket.recv(65536):
            pass


def _to_bare_grpc(address: str, chance: random.Random) -> None:
    """The same for a bare stream of gRPC: a byte that says whether it is the last of a transfer, and the rest."""
    given = [b"\1" + bytes(64), b"\0" + bytes(4096)]
    key = net_key(_key())
    assert key is not None
    dialer = Dialer(key, net_parties(BARE_GRPC))

    def sent() -> Iterator[bytes]:
        yield dialer.nonce
        yield dialer.answer(next(heard))[0]
        for _ in range(4):
            yield mutated(chance, given)

    with open_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        heard = channel.stream_stream(method_path("Net", "Bare"))(sent(), timeout=ANSWER_SECONDS)
        for _ in heard:
            pass


def _attacked(name: str, server: Program, port: int, visits: list[Visit], seconds: float, say: Say) -> list[str]:
    """Visits from its start on; what went wrong, in sentences."""
    door = Door((_LOOPBACK, port))
    if not within(END_SECONDS, lambda: _answers(door) or not server.running()) or not server.running():
        return [f"{name} ended, or never listened: {server.stderr()[-1500:]}"]
    _join(visited([door], WARM_UP_SECONDS, visits), WARM_UP_SECONDS)
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    begun = visited([door], seconds, visits)
    ended = _join(begun, seconds)
    if not server.running():
        return [f"{name} ended: {server.stderr()[-1500:]}"]
    grown = max(0, process.memory_info().rss - before)
    made = [attacker.made for attacker in begun]
    say(f"{name:<32} {sum(made):>9} connections, {made[-1]} of them with the key, grew by {grown / (1 << 20):.1f} MiB")
    problems = [] if all(made) and ended else [f"nothing was attacked, or a visit did not end: {made}"]
    if grown > GROWTH_BYTES:
        problems.append(f"{name} grew by {grown >> 20} MiB")
    return problems + raised(server.stderr())


def _join(begun: list[Any], seconds: float) -> bool:
    for attacker in begun:
        attacker.join(seconds + 4 * ANSWER_SECONDS)
    return not any(attacker.is_alive() for attacker in begun)


def _answers(door: Door) -> bool:
    try:
        door.connect().close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    found = meet(_spec(int(sys.argv[1]), float(sys.argv[2])), 1001, lambda _text: None)
    sys.stdout.write(json.dumps(found) + "\n")
