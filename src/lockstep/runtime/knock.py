"""What answers at an address: nothing, a refusal, silence, another program, or a server that may be Lockstep's.

A plain TCP connection tells more, and costs less, than a failed call of gRPC, so it comes first.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, replace

from lockstep.protocol.reach import Reach
from lockstep.protocol.timing import GREETING_SECONDS, KNOCK_SECONDS
from lockstep.runtime.addresses import Address, AddressError, IPAddress, parse_address, resolve, who_listens

_BANNER = 60

_HELLO_OF_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What every HTTP/2 client says first; a server of gRPC answers with a SETTINGS frame, anything else shows itself."""

_SETTINGS_FRAME = 4


@dataclass(frozen=True, slots=True)
class Knock:
    """What a connection attempt found; ``detail`` is a phrase for people that goes on from the address."""

    answer: Reach
    detail: str = ""
    note: str = ""
    """What the name stands for, where that explains the rest."""


def knock(address: str, seconds: float = KNOCK_SECONDS) -> Knock:
    """Try a plain TCP connection to ``host:port``, all its addresses. Blocks up to about ``seconds``."""
    deadline = time.monotonic() + seconds
    try:
        place = parse_address(address)
        numbers = resolve(place.host, seconds)
    except AddressError as error:
        return Knock(Reach.UNRESOLVED, f"cannot be looked up: {str(error).removesuffix('.')}")
    note = what_a_name_means(place, numbers)
    found = Knock(Reach.SILENT, _silent(seconds))
    for number in numbers:
        left = max(0.05, (deadline - time.monotonic()) / len(numbers))
        found = _connect(number, place.port, left, seconds)
        if found.answer is Reach.OPEN:
            break
    return replace(found, note=note)


def what_a_name_means(place: Address, numbers: tuple[IPAddress, ...]) -> str:
    """A remark on a name that means this machine itself, or an IPv6 address only; else empty."""
    if place.literal is not None or place.host.lower() == "localhost":
        return ""
    if all(number.is_loopback for number in numbers):
        return (
            f" ({place.host} means {numbers[0]} on this machine, which is this machine itself; correct /etc/hosts, "
            "or give a network address in the lists)"
        )
    if all(number.version == 6 for number in numbers):
        return (
            f" ({place.host} means the IPv6 address {numbers[0]} only; let its task listen there with --bind=::, "
            "or give its IPv4 address in the lists)"
        )
    return ""


def _connect(number: IPAddress, port: int, left: float, seconds: float) -> Knock:
    try:
        socket.create_connection((str(number), port), timeout=left).close()
    except TimeoutError:
        return Knock(Reach.SILENT, _silent(seconds))
    except ConnectionRefusedError:
        return Knock(Reach.REFUSED, "refuses connections; nothing listens there")
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            why = f"cannot be reached ({error.strerror}): the host is down or no network leads there"
            return Knock(Reach.NO_ROUTE, why)
        return Knock(Reach.SILENT, f"cannot be connected to ({error.strerror or error})")
    return Knock(Reach.OPEN)


def _silent(seconds: float) -> str:
    return f"gives no answer within {seconds:g} s: the host is down, or a firewall drops the packets"


def greet(address: str, seconds: float = GREETING_SECONDS) -> Knock:
    """Ask what speaks at an address that accepts connections: OPEN for a server of gRPC, else what it is instead."""
    place = parse_address(address)
    try:
        number = resolve(place.host, seconds)[0]
        with socket.create_connection((str(number), place.port), timeout=seconds) as line:
            line.sendall(_HELLO_OF_HTTP2)
            reply = line.recv(_BANNER)
    except TimeoutError:
        return Knock(Reach.MUTE, f"accepts connections but says nothing{_holder(place)}")
    except (OSError, AddressError):
        reply = b""
    if len(reply) >= 4 and reply[3] == _SETTINGS_FRAME:
        return Knock(Reach.OPEN)
    return Knock(Reach.OTHER_PROGRAM, f"is another program, not Lockstep{_banner(reply)}{_holder(place)}")


def _banner(reply: bytes) -> str:
    line = reply.decode("ascii", "replace").splitlines()[0] if reply.strip() else ""
    shown = "".join(character for character in line if character.isprintable() and character != "\ufffd")
    return f" (it says {shown!r})" if shown else ""


def _holder(place: Address) -> str:
    """Which process of this machine it is, where the address is this machine's."""
    from lockstep.runtime.addresses import is_local_address

    try:
        holder = who_listens(place.port) if is_local_address(place.host) else None
    except AddressError:
        return ""
    return "" if holder is None else f", {holder}"
