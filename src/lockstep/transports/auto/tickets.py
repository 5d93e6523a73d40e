"""One ticket that is valid on every path, and one address that names them all."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import TransportError, loan_ticket

NAME: Final = "auto"
_PART: Final = struct.Struct("<BQQH")


def pack_tickets(nbytes: int, tickets: Iterable[Ticket]) -> Ticket:
    """All the ways to reach one region."""
    packed = b"".join(
        _PART.pack(len(t.transport), t.region, t.address, len(t.key)) + t.transport.encode() + t.key for t in tickets
    )
    return Ticket(NAME, 0, nbytes, 0, packed)


@lru_cache(maxsize=1024)
def ticket_for(path: str, ticket: Ticket) -> Ticket:
    """The part of ``ticket`` for this path. Cached, because every transfer asks with the same few tickets."""
    if ticket.transport != NAME:
        raise TransportError(f"this ticket is for {ticket.transport}, not for {NAME}: ask the peer for another one")
    if not ticket.key:
        return loan_ticket(path, ticket.nbytes)
    for part in _parts(ticket):
        if part.transport == path:
            return part
    raise TransportError(f"this ticket is not valid over {path}: ask the peer for another one")


def _parts(ticket: Ticket) -> Iterator[Ticket]:
    packed, at = ticket.key, 0
    try:
        while at < len(packed):
            name_bytes, region, address, key_bytes = _PART.unpack_from(packed, at)
            at += _PART.size
            name = packed[at : at + name_bytes].decode()
            at += name_bytes
            yield Ticket(name, region, ticket.nbytes, address, packed[at : at + key_bytes])
            at += key_bytes
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError("this ticket cannot be read: ask the peer for another one") from error


_ADDRESS: Final = struct.Struct("<BH")


def pack_addresses(addresses: Iterable[tuple[str, bytes]]) -> bytes:
    """The address of a task on each path."""
    return b"".join(_ADDRESS.pack(len(name), len(where)) + name.encode() + where for name, where in addresses)


def unpack_addresses(packed: bytes) -> dict[str, bytes]:
    """What ``pack_addresses`` packed; ValueError for anything else."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(packed):
        if at + _ADDRESS.size > len(packed):
            raise ValueError("an address is cut off")
        name_bytes, where_bytes = _ADDRESS.unpack_from(packed, at)
        at += _ADDRESS.size
        name = packed[at : at + name_bytes].decode()
        at += name_bytes
        found[name] = packed[at : at + where_bytes]
        at += where_bytes
    return found
