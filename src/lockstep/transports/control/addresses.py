"""``host:port`` as people write it, and what this machine knows about it.

``parse_address`` and ``parse_bind`` look at the text only. ``resolve``, ``is_local_address`` and ``who_listens`` ask
this machine; each has a deadline or cannot block.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from dataclasses import dataclass

from lockstep.transports.control.host_names import listed_address

RESOLVE_DEADLINE = 10.0
"""Seconds that a name server may take. The C library's resolver has no deadline to set."""

_NAME_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_COMMAND_LENGTH = 120

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(ValueError):
    """An address that cannot be used; the text is one plain sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4 or IPv6 address without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def literal(self) -> IPAddress | None:
        """The host as an IP address; None for a name."""
        return _ip(self.host)

    @property
    def is_wildcard(self) -> bool:
        """0.0.0.0 or ::, which a task can listen on but others cannot connect to."""
        literal = self.literal
        return literal is not None and literal.is_unspecified

    def same_place(self) -> tuple[str, int]:
        """Equal for two spellings of one address (letter case, zeros in IPv6)."""
        literal = self.literal
        return (str(literal) if literal is not None else self.host.lower().rstrip("."), self.port)


@dataclass(frozen=True, slots=True)
class Listener:
    """The process that holds a port; ``pid`` is None if the system does not reveal it."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"process {self.pid} ({self.command})" if self.command else f"process {self.pid}"


def parse_address(text: str) -> Address:
    """Read ``host:port`` or ``[IPv6]:port``; for anything else AddressError says what is wrong."""
    if "://" in text:
        raise AddressError(f"{text!r} looks like a web address; write HOST:PORT alone, for example 10.0.0.1:2222.")
    host, port = _split(text)
    if not host:
        raise AddressError(f"{text!r} has no host; write HOST:PORT, for example 10.0.0.1:2222.")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise AddressError(f"the port in {text!r} is not a number from 1 to 65535; write HOST:PORT.")
    _check_host(host, text)
    return Address(host, int(port))


def parse_bind(text: str, default_port: int) -> Address:
    """Read what to listen on: host:port, or a host alone, which gets ``default_port``; ``0.0.0.0`` and ``::`` too."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if _ip(bare) is not None:
        return Address(bare, default_port)
    if ":" in text:
        return parse_address(text)
    _check_host(text, text)
    return Address(text, default_port)


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]:")
        if not bracket:
            raise AddressError(f"{text!r} is not an address; write an IPv6 address as [ADDRESS]:PORT.")
        if not isinstance(_ip(host), ipaddress.IPv6Address):
            raise AddressError(f"{host!r} in {text!r} is not an IPv6 address; only those take brackets.")
        return host, port
    if text.count(":") > 1:
        raise AddressError(f"{text!r} has more than one colon; write HOST:PORT, and an IPv6 address as [ADDRESS]:PORT.")
    host, colon, port = text.partition(":")
    if not colon:
        example = f"{text}:2222" if text else "10.0.0.1:2222"
        raise AddressError(f"{text!r} has no port; write HOST:PORT, for example {example}.")
    return host, port


def _check_host(host: str, text: str) -> None:
    if _ip(host) is not None:
        return
    if re.fullmatch(r"[0-9.]+", host):
        raise AddressError(f"{host!r} in {text!r} is not an IPv4 address; it needs four numbers from 0 to 255.")
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_NAME_LABEL.fullmatch(label) for label in labels):
        raise AddressError(f"{host!r} in {text!r} is not a host name; use letters, digits, '-' and '.' only.")


def _ip(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def resolve(host: str, deadline: float = RESOLVE_DEADLINE) -> tuple[IPAddress, ...]:
    """All IP addresses of a name; AddressError with the system's message if there is none, or no answer in time."""
    literal = _ip(host)
    if literal is not None:
        return (literal,)
    if (listed := listed_address(host)) is not None:
        return (ipaddress.ip_address(listed),)
    answers: list[tuple[IPAddress, ...] | OSError] = []
    # On its own thread, because getaddrinfo takes no deadline; it is a daemon and ends with its answer.
    asker = threading.Thread(target=_look_up, args=(host, answers), name=f"resolve {host}", daemon=True)
    asker.start()
    asker.join(deadline)
    if not answers:
        raise AddressError(f"the name {host!r} did not resolve within {deadline:g} seconds.")
    answer = answers[0]
    if isinstance(answer, OSError):
        raise AddressError(f"the name {host!r} does not resolve ({answer.strerror or answer}).")
    return answer


def where_now(address: str) -> str:
    """``host:port`` for libraries that resolve names themselves: a name that only we know becomes its address."""
    host, _, port = address.rpartition(":")
    listed = listed_address(host)
    return address if listed is None else str(Address(listed, int(port)))


def _look_up(host: str, answers: list[tuple[IPAddress, ...] | OSError]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        answers.append(error)
    except UnicodeError:
        answers.append(OSError(0, "it is not a valid name"))
    else:
        numbers = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
        answers.append(tuple(dict.fromkeys(numbers)))


def interface_addresses() -> frozenset[IPAddress]:
    """Every address of this machine's interfaces."""
    return frozenset(_interfaces())


def interface_of(host: str) -> str | None:
    """The interface that has this address; None for 0.0.0.0 and ::, and for what is not an address of this machine.

    AddressError if the name does not resolve.
    """
    names = _interfaces()
    for address in resolve(host):
        if address in names:
            return names[address]
        if address.is_loopback:
            return names.get(ipaddress.ip_address("127.0.0.1"))  # which has all of 127.0.0.0/8
    return None


def _interfaces() -> dict[IPAddress, str]:
    """The interface of each address; what the system calls eth0:1 is a second address of eth0."""
    import psutil  # here, because most starts never need it

    found: dict[IPAddress, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            number = _ip(entry.address.partition("%")[0])
            if number is not None:
                found.setdefault(number, name.partition(":")[0])
    return found


def main_address() -> str:
    """The address with which this machine appears to others; that of loopback if it has no route to any."""
    for family, elsewhere in ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")):
        # Nothing is sent: the kernel only looks for the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_local_address(host: str) -> bool:
    """Whether a task of this machine can be reached at ``host``. AddressError if the name does not resolve."""
    addresses = resolve(host)
    if any(address.is_loopback for address in addresses):
        return True
    return not interface_addresses().isdisjoint(addresses)


def nothing_listens(port: int) -> bool:
    """Whether this machine's kernel knows of no socket that listens at this TCP port; False where it does not tell."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return False
    # Connections that have ended keep their port for a while; they do not count.
    listening = [entry.laddr.port for entry in connections if entry.status == psutil.CONN_LISTEN and entry.laddr]
    return port not in listening


def who_listens(port: int) -> Listener | None:
    """The process that holds a TCP port of this machine, as far as the system reveals it; None if none is found."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    holders = [entry for entry in connections if entry.laddr and entry.laddr.port == port]
    # Listening sockets first: a client's connection may have the same local port by chance.
    holders.sort(key=lambda entry: (entry.status != psutil.CONN_LISTEN, entry.pid is None))
    if not holders:
        return None
    pid = holders[0].pid
    if pid is None:
        return Listener(None, "")
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = ""
    return Listener(pid, command if len(command) <= _COMMAND_LENGTH else command[: _COMMAND_LENGTH - 3] + "...")
