"""How processes that a launcher started find each other: each knows only its rank and where rank 0 is.

Rank 0 listens at the address that all know. Every other rank sends it the port on which it will listen; once all have
arrived, rank 0 sends the whole list to every rank. Rank 0 takes the hosts from the connections, so no process needs to
know its own name.

Both ends of a connection first prove that they know the job's key (``security/wire.py``); every line after that has a
MAC. A guest also sends the address that it sees of itself: a relay on the way would have its own in the list. Visitors
are heard side by side, so one that says nothing, or one byte now and then, holds up nobody. No wait lasts longer than
the given timeout.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from lockstep.foreign import JsonError, plain, read_json
from lockstep.protocol.core.timing import SAY_SECONDS
from lockstep.security.listening import ProvenListener
from lockstep.security.proof import Parties, ProofError, Refusal
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.wire import PROOF_SECONDS, Claim, ProvenSocket, dial
from lockstep.transports.control.addresses import (
    Address,
    AddressError,
    IPAddress,
    interface_addresses,
    main_address,
    parse_bind,
    resolve,
)

MAX_LINE_BYTES = 1 << 20
"""Of the list that rank 0 sends."""
GREETING_BYTES = 4096
TALK_SECONDS = 10.0
"""A process that has proven itself sends its line at once."""
RETRY_SECONDS = 0.2

Say = Callable[[str], None]

_TRY_AGAIN: Final = frozenset({Refusal.LATE, Refusal.CROWDED, Refusal.CLOSED})
"""Rank 0 was busy, or is gone; everything else stays as it is."""


class RendezvousError(Exception):
    """The processes did not find each other; one sentence names those missing, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSpec:
    """Which processes meet, and where. ``key``: what they prove to know; None (``--insecure``): nothing."""

    rank: int
    world: int
    address: Address
    timeout: float
    version: str
    key: bytes | None = field(repr=False)
    bind: str | None = None
    """The address at which rank 0 listens, if it is not the one that the others know."""

    def parties(self, guest: str, guest_life: int) -> Parties:
        return Parties(
            purpose="rendezvous",
            dialer=guest,
            acceptor="rank 0",
            version=self.version,
            dialer_life=guest_life,
            job=f"port {self.address.port}",
        )


def meet(meeting: RendezvousSpec, port: int, say: Say) -> tuple[str, ...]:
    """``host:port`` of every rank, in order; RendezvousError if not all arrived in time."""
    if meeting.rank == 0:
        return _Host(meeting, port, say).gather()
    return _ask(meeting, port, say)


def own_addresses(meeting: RendezvousSpec) -> list[str]:
    """Where rank 0 listens: at the address that the others know, as far as it is one of this machine.

    Where it is not (the address of a service in front), or this machine resolves its own name to loopback (many do),
    the others come to the address with which this machine appears to them.
    """
    if meeting.bind is not None:
        return [str(resolve(parse_bind(meeting.bind, 1).host)[0])]
    name, own = meeting.address.host, interface_addresses()
    found: list[IPAddress] = []
    with contextlib.suppress(AddressError):
        found = [address for address in resolve(name) if address in own or address.is_loopback]
    means_loopback = meeting.address.literal is not None or name.lower() == "localhost"
    numbers = [str(address) for address in found]
    if not found or (all(address.is_loopback for address in found) and not means_loopback):
        numbers.append(main_address())
    return list(dict.fromkeys(numbers))


class _Host:
    """Rank 0: collects the line of every other rank and answers with the list."""

    def __init__(self, meeting: RendezvousSpec, port: int, say: Say) -> None:
        self._meeting = meeting
        self._say = say
        self._changed = threading.Condition()
        self._ports = {0: port}
        self._guests: dict[int, ProvenSocket] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._answer = b""
        """The list, once all are there."""
        self._over = False

    def gather(self) -> tuple[str, ...]:
        meeting = self._meeting
        if meeting.world == 1:
            return (str(Address("127.0.0.1", self._ports[0])),)
        with contextlib.ExitStack() as opened:
            for host in own_addresses(meeting):
                listener = self._listen(host)
                refused = REFUSALS.at(Entrance.RENDEZVOUS, str(Address(host, meeting.address.port)))
                door = ProvenListener(listener, meeting.key, self._believed, self._hear, "rendezvous", refused)
                opened.callback(door.close)
            opened.callback(self._see_guests_off)
            self._wait_for_all()
            with self._changed:
                hosts, guests = self._hosts(), list(self._guests.values())
                self._answer = json.dumps({"hosts": hosts}).encode()
            for guest in guests:
                self._tell(guest)
        return tuple(hosts)

    def _tell(self, guest: ProvenSocket) -> None:
        with contextlib.suppress(ProofError):  # it has ended; its own output says why
            guest.send(self._answer, time.monotonic() + TALK_SECONDS)

    def _see_guests_off(self) -> None:
        with self._changed:
            self._over = True
            guests = list(self._guests.values())
        for guest in guests:
            guest.close()

    def _listen(self, host: str) -> socket.socket:
        port = self._meeting.address.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=max(128, self._meeting.world))
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at {Address(host, port)} ({error.strerror}); choose another port with "
                "lockstep.join(address='HOST:PORT') or MASTER_PORT"
            ) from None

    def _wait_for_all(self) -> None:
        meeting = self._meeting
        began = said_at = time.monotonic()
        with self._changed:
            while len(self._ports) < meeting.world:
                now = time.monotonic()
                left = began + meeting.timeout - now
                if left <= 0:
                    raise RendezvousError(
                        f"ranks {self._missing()} of {meeting.world} did not connect to {meeting.address} within "
                        f"{meeting.timeout:g} s; look at their output, and check whether they can reach that address"
                    )
                if now - said_at >= SAY_SECONDS:
                    said_at = now
                    self._say(f"rank 0 is waiting at {meeting.address} for ranks {self._missing()}")
                self._changed.wait(min(left, said_at + SAY_SECONDS - now))

    def _missing(self) -> str:
        return ", ".join(str(rank) for rank in range(self._meeting.world) if rank not in self._ports)

    def _hear(self, guest: ProvenSocket) -> None:
        """On the guest's own thread."""
        line = _read(guest.receive(GREETING_BYTES, time.monotonic() + TALK_SECONDS))
        problem = self._admit(line, guest)
        if problem:
            guest.send(json.dumps({"problem": problem}).encode(), time.monotonic() + TALK_SECONDS)
            guest.close()
        elif self._answer:  # the next life of a rank that was lost just before the list was made
            self._tell(guest)

    def _believed(self, claim: Claim) -> Parties:
        return self._meeting.parties(claim.dialer, claim.dialer_life)

    def _admit(self, line: dict[str, object], guest: ProvenSocket) -> str:
        """What is wrong with this guest; empty: it is in the list now."""
        rank, port, host = line.get("rank"), line.get("port"), line.get("host")
        world = self._meeting.world
        if line.get("world") != world:
            return (
                f"rank 0 has a different world ({_short(line.get('world'))}, not {world}); start all processes with "
                "the same launcher command"
            )
        if type(rank) is not int or not 0 < rank < world or type(port) is not int or not 0 < port < 1 << 16:
            return f"rank {_short(rank)} is not one of 1 to {world - 1}, or port {_short(port)} is none"
        seen = _plain_host(guest.socket.getpeername())
        if host != seen:
            return (
                f"rank {rank} has the address {_short(host)}, but its connection comes from {seen}: something on the "
                "way replaces addresses; give all processes an address of rank 0 that they reach directly"
            )
        with self._changed:
            if self._over:
                return "rank 0 does not wait any longer"
            # At the same place it is the next life of a program below ``lockstep run``, which keeps that port for it.
            if self._places.setdefault(rank, (seen, port)) != (seen, port):
                return f"two processes have rank {rank}; give each its own rank"
            if (former := self._guests.pop(rank, None)) is not None:
                former.close()
            self._ports[rank] = port
            self._guests[rank] = guest
            self._changed.notify_all()
        return ""

    def _hosts(self) -> list[str]:
        """Where the others can reach each rank. Ranks that connected over loopback are on the machine of rank 0."""
        seen = {rank: _plain_host(guest.socket.getpeername()) for rank, guest in self._guests.items()}
        own = next(
            (
                _plain_host(self._guests[rank].socket.getsockname())
                for rank, host in seen.items()
                if not _is_loopback(host)
            ),
            "127.0.0.1",
        )
        placed = {0: own} | {rank: own if _is_loopback(host) else host for rank, host in seen.items()}
        return [str(Address(placed[rank], self._ports[rank])) for rank in range(self._meeting.world)]


def _ask(meeting: RendezvousSpec, port: int, say: Say) -> tuple[str, ...]:
    deadline = time.monotonic() + meeting.timeout
    rank_0 = _reach(meeting, deadline, say)
    with contextlib.closing(rank_0):
        greeting = {"rank": meeting.rank, "world": meeting.world, "port": port}
        host = _plain_host(rank_0.socket.getsockname())
        try:
            rank_0.send(json.dumps(greeting | {"host": host}).encode(), time.monotonic() + TALK_SECONDS)
            answer = _read(rank_0.receive(MAX_LINE_BYTES, deadline + TALK_SECONDS))
        except ProofError as error:
            if error.refusal is Refusal.ALTERED:
                raise RendezvousError(f"rank {meeting.rank} cannot trust {meeting.address}: {error}") from None
            raise RendezvousError(
                f"rank 0 at {meeting.address} ended before all ranks had connected; its output names the missing ones"
            ) from None
    if "problem" in answer:
        raise RendezvousError(f"rank {meeting.rank} was refused: {plain(str(answer['problem']))}")
    hosts = answer.get("hosts")
    if not isinstance(hosts, list) or len(hosts) != meeting.world:
        raise RendezvousError(f"what answers at {meeting.address} is not rank 0 of this job; choose another port")
    return tuple(plain(str(host)) for host in hosts)


def _reach(meeting: RendezvousSpec, deadline: float, say: Say) -> ProvenSocket:
    """Connect to rank 0, again and again until it has proven itself; RendezvousError if it is somebody else."""
    said_at = time.monotonic()
    while True:
        try:
            return _connect_once(meeting, deadline)
        except OSError as error:
            reason = error.strerror or str(error)
        except ProofError as error:
            if error.refusal not in _TRY_AGAIN:
                raise RendezvousError(
                    f"rank {meeting.rank} and what listens at {meeting.address} are not of the same job: {error}; or "
                    "is another program listening there?"
                ) from None
            reason = str(error)
        now = time.monotonic()
        if now >= deadline:
            raise RendezvousError(
                f"rank {meeting.rank} could not reach rank 0 at {meeting.address} within {meeting.timeout:g} s "
                f"({reason}); is rank 0 running there, with the same port?"
            )
        if now - said_at >= SAY_SECONDS:
            said_at = now
            say(f"rank {meeting.rank} is waiting for rank 0 at {meeting.address} ({reason})")
        time.sleep(min(RETRY_SECONDS, max(0.0, deadline - now)))


def _connect_once(meeting: RendezvousSpec, deadline: float) -> ProvenSocket:
    where = (meeting.address.host, meeting.address.port)
    guest = socket.create_connection(where, timeout=max(0.1, min(TALK_SECONDS, deadline - time.monotonic())))
    try:
        parties = meeting.parties(f"rank {meeting.rank}", secrets.randbits(63))
        return dial(guest, meeting.key, parties, min(deadline, time.monotonic() + PROOF_SECONDS))
    except BaseException:
        guest.close()
        raise


def _plain_host(name: tuple[object, ...]) -> str:
    """The numeric host of a socket's name; an IPv4 address may be written as one of IPv6."""
    host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _read(line: bytes) -> dict[str, object]:
    """One bounded object of JSON; ``ProofError`` for anything else."""
    try:
        content = read_json(line, MAX_LINE_BYTES)
    except JsonError as error:
        raise ProofError(Refusal.MALFORMED) from error
    if not isinstance(content, dict):
        raise ProofError(Refusal.MALFORMED)
    return content


def _short(value: object) -> str:
    return plain(repr(value), 40)
