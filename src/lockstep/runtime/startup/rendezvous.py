"""How processes that a launcher started find each other: each knows only its rank and where rank 0 is.

Rank 0 listens at the address that all know. Every other rank sends it the port on which it will listen; once all have
arrived, rank 0 sends the whole list to every rank. Rank 0 takes the hosts from the connections, so no process needs to
know its own name. One bounded line of JSON each way; no wait lasts longer than the given timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.protocol.core.timing import SAY_SECONDS
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
TALK_SECONDS = 10.0
"""A process that has connected sends its line at once."""
RETRY_SECONDS = 0.2

Say = Callable[[str], None]


class RendezvousError(Exception):
    """The processes did not find each other; one sentence names those missing, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSpec:
    """Which processes meet, and where."""

    rank: int
    world: int
    address: Address
    timeout: float
    version: str
    token: str = field(default="", repr=False)
    bind: str | None = None
    """The address at which rank 0 listens, if it is not the one that the others know."""

    def greeting(self, port: int) -> dict[str, object]:
        secret = hashlib.sha256(self.token.encode()).hexdigest()
        return {"rank": self.rank, "world": self.world, "port": port, "version": self.version, "token": secret}


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
        self._ports = {0: port}
        self._guests: dict[int, socket.socket] = {}
        self._began = time.monotonic()
        self._said_at = self._began

    def gather(self) -> tuple[str, ...]:
        meeting = self._meeting
        if meeting.world == 1:
            return (str(Address("127.0.0.1", self._ports[0])),)
        with contextlib.ExitStack() as opened:
            listeners = [opened.enter_context(self._listen(host)) for host in own_addresses(meeting)]
            opened.callback(self._see_guests_off)
            while len(self._ports) < meeting.world:
                self._take_one(listeners)
            hosts = self._hosts()
            for guest in self._guests.values():
                _send(guest, {"hosts": hosts})
        return tuple(hosts)

    def _see_guests_off(self) -> None:
        for guest in self._guests.values():
            guest.close()

    def _listen(self, host: str) -> socket.socket:
        port = self._meeting.address.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=max(128, self._meeting.world))
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at {Address(host, port)} ({error.strerror}); choose another port with "
                "lockstep.join(address='HOST:PORT') or MASTER_PORT"
            ) from None
        listener.setblocking(False)
        return listener

    def _take_one(self, listeners: list[socket.socket]) -> None:
        left = self._began + self._meeting.timeout - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"ranks {self._missing()} of {self._meeting.world} did not connect to {self._meeting.address} within "
                f"{self._meeting.timeout:g} s; look at their output, and check whether they can reach that address"
            )
        ready, _, _ = select.select(listeners, [], [], min(left, 1.0))
        if not ready:
            if time.monotonic() - self._said_at >= SAY_SECONDS:
                self._said_at = time.monotonic()
                self._say(f"rank 0 is waiting at {self._meeting.address} for ranks {self._missing()}")
            return
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has hung up again
            self._admit(ready[0].accept()[0])

    def _missing(self) -> str:
        return ", ".join(str(rank) for rank in range(self._meeting.world) if rank not in self._ports)

    def _admit(self, guest: socket.socket) -> None:
        line = _receive(guest)
        problem = self._problem(line)
        if line is None or problem:
            if problem:
                with contextlib.suppress(OSError):
                    _send(guest, {"problem": problem})
            guest.close()
            return
        rank, port = line["rank"], line["port"]
        assert isinstance(rank, int)
        assert isinstance(port, int)
        self._ports[rank] = port
        self._guests[rank] = guest

    def _problem(self, line: dict[str, object] | None) -> str:
        if line is None:
            return ""
        ours = self._meeting.greeting(0)
        for name, remedy in (
            ("token", "start every process with the same job token"),
            ("version", "install the same version of Lockstep everywhere"),
            ("world", "start all processes with the same launcher command"),
        ):
            if line.get(name) != ours[name]:
                shown = "" if name == "token" else f" ({line.get(name)}, not {ours[name]})"
                return f"rank 0 has a different {name}{shown}; {remedy}"
        rank, port = line.get("rank"), line.get("port")
        if not isinstance(rank, int) or not isinstance(port, int) or not 0 < rank < self._meeting.world:
            return f"rank {rank!r} is not one of 1 to {self._meeting.world - 1}"
        if rank in self._ports:
            return f"two processes have rank {rank}; give each its own rank"
        return ""

    def _hosts(self) -> list[str]:
        """Where the others can reach each rank. Ranks that connected over loopback are on the machine of rank 0."""
        seen = {rank: str(guest.getpeername()[0]) for rank, guest in self._guests.items()}
        own = next(
            (str(self._guests[rank].getsockname()[0]) for rank, host in seen.items() if not _is_loopback(host)),
            "127.0.0.1",
        )
        placed = {0: own} | {rank: own if _is_loopback(host) else host for rank, host in seen.items()}
        return [str(Address(placed[rank], self._ports[rank])) for rank in range(self._meeting.world)]


def _ask(meeting: RendezvousSpec, port: int, say: Say) -> tuple[str, ...]:
    deadline = time.monotonic() + meeting.timeout
    guest = _connect(meeting, deadline, say)
    with guest:
        _send(guest, meeting.greeting(port))
        guest.settimeout(max(0.1, deadline + TALK_SECONDS - time.monotonic()))
        answer = _receive(guest, patient=True)
    if answer is None:
        raise RendezvousError(
            f"rank 0 at {meeting.address} ended before all ranks had connected; its output names the missing ones"
        )
    if "problem" in answer:
        raise RendezvousError(f"rank {meeting.rank} was refused: {answer['problem']}")
    hosts = answer.get("hosts")
    if not isinstance(hosts, list) or len(hosts) != meeting.world:
        raise RendezvousError(f"what answers at {meeting.address} is not rank 0 of this job; choose another port")
    return tuple(str(host) for host in hosts)


def _connect(meeting: RendezvousSpec, deadline: float, say: Say) -> socket.socket:
    said_at = time.monotonic()
    while True:
        try:
            return socket.create_connection((meeting.address.host, meeting.address.port), timeout=TALK_SECONDS)
        except OSError as error:
            now = time.monotonic()
            reason = error.strerror or str(error)
            if now >= deadline:
                raise RendezvousError(
                    f"rank {meeting.rank} could not reach rank 0 at {meeting.address} within {meeting.timeout:g} s "
                    f"({reason}); is rank 0 running there, with the same port?"
                ) from None
            if now - said_at >= SAY_SECONDS:
                said_at = now
                say(f"rank {meeting.rank} is waiting for rank 0 at {meeting.address} ({reason})")
            time.sleep(min(RETRY_SECONDS, max(0.0, deadline - now)))


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "::ffff:127.0.0.1")


def _send(peer: socket.socket, line: dict[str, object]) -> None:
    peer.sendall(json.dumps(line).encode() + b"\n")


def _receive(peer: socket.socket, *, patient: bool = False) -> dict[str, object] | None:
    """One line of JSON; None if there is none (another program, or the end of the connection)."""
    if not patient:
        peer.settimeout(TALK_SECONDS)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) <= MAX_LINE_BYTES:
            chunk = peer.recv(65536)
            if not chunk:
                return None
            data += chunk
        line = json.loads(data)
    except (OSError, ValueError):
        return None
    return line if isinstance(line, dict) else None
