"""How the ranks of torchrun find each other: in the store that torchrun itself runs for them.

It listens already and belongs to this launch alone, so no port has to be guessed that may be taken. Every rank enters
the port on which it will listen, and the address that this machine has on the route to the store; then it reads what
all have entered. With a key every entry has a MAC (``training/sealed_store.py``): whoever else reaches the store can
spoil the meeting, but lead nobody elsewhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.foreign import JsonError, plain, read_json
from lockstep.protocol.core.timing import SAY_SECONDS
from lockstep.runtime.startup.rendezvous import RendezvousError
from lockstep.training.ranks.listening import reach_store
from lockstep.training.sealed_store import SealedStore, StoreForged
from lockstep.training.torch_private import c10d
from lockstep.transports.control.addresses import Address, AddressError, IPAddress, resolve

LOOK_SECONDS = 0.2
ENTRY_BYTES = 4096

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeeting:
    """Which ranks meet, and in which store. ``key``: what they prove to know; None (``--insecure``): nothing."""

    rank: int
    world: int
    store: Address
    name: str
    """Tells this meeting from others in the same store: torchrun may start its ranks again, and a program may join
    several jobs, one after the other."""
    timeout: float
    version: str
    key: bytes | None = field(repr=False)


def meet_in_store(meeting: StoreMeeting, port: int, say: Say) -> tuple[str, ...]:
    """``host:port`` of every rank, in order; RendezvousError if not all arrived in time."""
    deadline = time.monotonic() + meeting.timeout
    try:
        tcp = reach_store(meeting.store.host, meeting.store.port, None, max(1.0, meeting.timeout))
        store = c10d.PrefixStore(f"lockstep/{meeting.name}", tcp)
        own, of_store = _route_to(meeting.store)
        _arrive(meeting, store, deadline, say)
        sealed = store if meeting.key is None else SealedStore(store, meeting.key, meeting.rank, meeting.world)
        entry = {"host": str(own), "port": port, "store": str(of_store), "version": meeting.version}
        sealed.set(f"rank/{meeting.rank}", json.dumps(entry))
        entries = [_entry(meeting, rank, bytes(sealed.get(f"rank/{rank}"))) for rank in range(meeting.world)]
    except StoreForged:
        raise RendezvousError(
            f"the entries in torchrun's store at {meeting.store} do not have this rank's key: give all ranks the same "
            "key file, and let nobody else reach that port"
        ) from None
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RendezvousError(
            f"rank {meeting.rank} cannot use torchrun's store at {meeting.store} ({plain(reason, 200)}); is torchrun "
            "still running there? lockstep.join(address='HOST:PORT') meets at another address"
        ) from None
    return _placed(entries)


def _route_to(store: Address) -> tuple[IPAddress, IPAddress]:
    """The address that this machine has towards the store's, and the store's; no packet is sent."""
    try:
        of_store = resolve(store.host)[0]
    except AddressError as error:
        raise RendezvousError(f"the address of torchrun's store is not known here: {error}") from None
    family = socket.AF_INET6 if of_store.version == 6 else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((str(of_store), store.port))
        return ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0]), of_store


def _arrive(meeting: StoreMeeting, store: c10d.Store, deadline: float, say: Say) -> None:
    """Enter this rank, and wait until all have; prints which are missing."""
    store.set(f"arrived/{meeting.rank}", "")
    said_at = time.monotonic()
    missing = set(range(meeting.world)) - {meeting.rank}
    while missing := {rank for rank in missing if not store.check([f"arrived/{rank}"])}:
        named = ", ".join(map(str, sorted(missing)))
        now = time.monotonic()
        if now >= deadline:
            raise RendezvousError(
                f"ranks {named} of {meeting.world} did not come to torchrun's store at {meeting.store} within "
                f"{meeting.timeout:g} s; look at their output, and check whether they call lockstep.join()"
            )
        # Rank 0 speaks for all, unless it is the one that is missing.
        if now - said_at >= SAY_SECONDS and meeting.rank == min(set(range(meeting.world)) - missing):
            said_at = now
            say(f"rank {meeting.rank} is waiting for ranks {named}")
        time.sleep(min(LOOK_SECONDS, max(0.0, deadline - now)))


@dataclass(frozen=True, slots=True)
class _Entry:
    host: IPAddress
    port: int
    store: IPAddress


def _entry(meeting: StoreMeeting, rank: int, raw: bytes) -> _Entry:
    try:
        content = read_json(raw, ENTRY_BYTES)
        if not isinstance(content, dict):
            raise TypeError
        if content["version"] != meeting.version:
            raise RendezvousError(
                f"rank {rank} runs Lockstep {plain(str(content['version']), 40)} and rank {meeting.rank} "
                f"{meeting.version}; install the same version everywhere"
            )
        host, store = ipaddress.ip_address(str(content["host"])), ipaddress.ip_address(str(content["store"]))
        port = content["port"]
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError
    except (JsonError, KeyError, TypeError, ValueError):
        raise RendezvousError(
            f"what torchrun's store at {meeting.store} holds for rank {rank} is not an address; does another program "
            "write there?"
        ) from None
    return _Entry(host, port, store)


def _placed(entries: list[_Entry]) -> tuple[str, ...]:
    """Where the others can reach each rank. One whose route is loopback is on the machine of the store."""
    far = next((entry for entry in entries if not entry.host.is_loopback), None)
    hosts = [entry.host if far is None or not entry.host.is_loopback else far.store for entry in entries]
    return tuple(str(Address(str(host), entry.port)) for host, entry in zip(hosts, entries, strict=True))
