"""What answers at an address: nothing, a refusal, silence, another program, or a server that may be Lockstep's.

A plain TCP connection reveals more, and costs less, than a failed gRPC call, so it is tried first.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, replace

from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.core.timing import GREETING_SECONDS, PROBE_SECONDS
from lockstep.security.chosen import chosen_key, is_insecure
from lockstep.transports import phrases
from lockstep.transports.control.addresses import (
    Address,
    AddressError,
    IPAddress,
    is_local_address,
    parse_address,
    resolve,
    who_listens,
)
from lockstep.transports.control.channels import open_plain_channel
from lockstep.transports.control.codec import WireError, decode_description
from lockstep.transports.control.credentials import own_certificates
from lockstep.transports.control.tls_greeting import Greeting, greet
from lockstep.transports.quiet_grpc import grpc

_BANNER = 60

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What every HTTP/2 client sends first. A gRPC server answers with a SETTINGS frame; others show what they are."""

_SETTINGS_FRAME = 4


@dataclass(frozen=True, slots=True)
class Probe:
    """What a connection attempt found; ``phrase`` is for people and continues from the address."""

    reach: Reach
    phrase: str = ""
    note: str = ""
    """What the host name resolves to, if that explains the rest."""

    @property
    def is_open(self) -> bool:
        return self.reach is Reach.OPEN

    @property
    def no_packet_returns(self) -> bool:
        """Neither a connection nor a refusal: most likely a firewall, or a host that is down."""
        return self.reach in (Reach.SILENT, Reach.NO_ROUTE, Reach.BROKEN)

    def silence(self, address: str) -> Silence:
        return Silence(self.reach, f"{address} {self.phrase}{self.note}")


REFUSED = Probe(Reach.REFUSED, "refuses connections; nothing listens there")


def probe(address: str, seconds: float = PROBE_SECONDS, lookup_seconds: float | None = None) -> Probe:
    """Try a plain TCP connection to every IP address of ``host:port``. Blocks for about ``seconds`` at most.

    ``lookup_seconds``: how long the name server may take, if that differs.
    """
    deadline = time.monotonic() + seconds
    try:
        place = parse_address(address)
    except AddressError as error:
        return Probe(Reach.BROKEN, f"cannot be used: {str(error).removesuffix('.')}")
    try:
        numbers = resolve(place.host, seconds if lookup_seconds is None else lookup_seconds)
    except AddressError as error:
        return Probe(Reach.UNRESOLVED, f"cannot be looked up: {str(error).removesuffix('.')}")
    found = _silent(seconds)
    for number in numbers:
        left = max(0.05, (deadline - time.monotonic()) / len(numbers))
        found = _connect(number, place.port, left, seconds)
        if found.is_open:
            break
    return replace(found, note=_what_a_name_means(place, numbers))


def _what_a_name_means(place: Address, numbers: tuple[IPAddress, ...]) -> str:
    """A remark about a name that resolves to this machine itself, or to IPv6 addresses only; otherwise empty."""
    if place.literal is not None or place.host.lower() == "localhost":
        return ""
    if all(number.is_loopback for number in numbers):
        return (
            f" (here {place.host} resolves to {numbers[0]}, which is this machine itself; correct /etc/hosts, or put "
            "a network address in the host lists)"
        )
    if all(number.version == 6 for number in numbers):
        return (
            f" ({place.host} resolves only to the IPv6 address {numbers[0]}; start its task with --bind=:: so that it "
            "listens there, or put its IPv4 address in the host lists)"
        )
    return ""


def _connect(number: IPAddress, port: int, left: float, seconds: float) -> Probe:
    try:
        socket.create_connection((str(number), port), timeout=left).close()
    except TimeoutError:
        return _silent(seconds)
    except (ConnectionRefusedError, ConnectionResetError):  # reset: whoever listened closes at this moment
        return REFUSED
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            why = f"cannot be reached ({error.strerror}): the host is down, or there is no network route to it"
            return Probe(Reach.NO_ROUTE, why)
        return Probe(Reach.BROKEN, f"does not accept a connection ({error.strerror or error})")
    return Probe(Reach.OPEN)


def _silent(seconds: float) -> Probe:
    why = f"did not answer within {seconds:g} s: the host is down, or a firewall drops the packets"
    return Probe(Reach.SILENT, why)


def probe_program(address: str, seconds: float = GREETING_SECONDS) -> Probe:
    """Find out what runs at an address that accepts connections: OPEN for a gRPC server with our key, otherwise what.

    Takes about ``seconds``, twice that for another program.
    """
    place = parse_address(address)
    try:
        number = str(resolve(place.host, seconds)[0])
        return (_ask_without_key if is_insecure() else _ask_with_key)(place, number, seconds)
    except TimeoutError:
        return Probe(Reach.MUTE, f"accepts connections but sends nothing{_holder(place)}")
    except AddressError:
        return _other_program(place, b"")


def _ask_with_key(place: Address, number: str, seconds: float) -> Probe:
    key, own = chosen_key(), own_certificates()
    assert key is not None
    assert own is not None
    greeted = greet(number, place.port, seconds, own.authority)
    match greeted.greeting:
        case Greeting.OUR_KEY:
            return Probe(Reach.OPEN)
        case Greeting.OTHER_KEY:
            return Probe(Reach.OTHER_KEY, phrases.has_another_key(greeted.version, key.path))
        case Greeting.NOT_LOCKSTEP:
            return _other_program(place, b"")
    reply = _first_words(number, place.port, seconds)
    if _is_grpc(reply) and _is_plain_lockstep(str(place), seconds):
        return Probe(Reach.INSECURE, phrases.has_no_key())
    return _other_program(place, reply)


def _ask_without_key(place: Address, number: str, seconds: float) -> Probe:
    reply = _first_words(number, place.port, seconds)
    if _is_grpc(reply):
        return Probe(Reach.OPEN)
    greeted = greet(number, place.port, seconds, None)
    if greeted.greeting is Greeting.OTHER_KEY:
        return Probe(Reach.INSECURE, phrases.wants_a_key(greeted.version))
    return _other_program(place, reply)


def _first_words(number: str, port: int, seconds: float) -> bytes:
    try:
        with socket.create_connection((number, port), timeout=seconds) as line:
            line.sendall(_HTTP2_PREFACE)
            return line.recv(_BANNER)
    except TimeoutError:
        raise
    except OSError:
        return b""


def _is_grpc(reply: bytes) -> bool:
    return len(reply) >= 4 and reply[3] == _SETTINGS_FRAME


def _is_plain_lockstep(address: str, seconds: float) -> bool:
    """Whether it describes itself to a caller without a key, as a monitor with ``--insecure`` does."""
    with open_plain_channel(address) as channel:
        try:
            decode_description(channel.unary_unary("/lockstep.Monitor/Describe")(b"", timeout=seconds))
        except (grpc.RpcError, WireError):
            return False
    return True


def _other_program(place: Address, reply: bytes) -> Probe:
    return Probe(Reach.OTHER_PROGRAM, f"is another program, not Lockstep{_banner(reply)}{_holder(place)}")


def _banner(reply: bytes) -> str:
    line = reply.decode("ascii", "replace").splitlines()[0] if reply.strip() else ""
    shown = "".join(character for character in line if character.isprintable() and character != "\ufffd")
    return f" (it sends {shown!r})" if shown else ""


def _holder(place: Address) -> str:
    """Which process of this machine it is, if the address belongs to this machine."""
    try:
        holder = who_listens(place.port) if is_local_address(place.host) else None
    except AddressError:
        return ""
    return "" if holder is None else f", {holder}"
