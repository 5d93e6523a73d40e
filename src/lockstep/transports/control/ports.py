"""``--ports=A-B``: the ports at which a task may listen besides the one in the host lists.

Firewalls and network policies can only name ports that are known. Tasks on one host share the range: each tries to
bind one port after another and keeps the first that it gets.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from lockstep.errors import BadInput
from lockstep.transports.control.addresses import Address, AddressError, resolve


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports from ``first`` to ``last``, except those that are promised to others."""

    first: int
    last: int
    promised: frozenset[int] = frozenset()
    """The ports of the host lists: a monitor that starts later must still find its own free."""

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __iter__(self) -> Iterator[int]:
        return (port for port in range(self.first, self.last + 1) if port not in self.promised)

    @property
    def agreed(self) -> int:
        """The port that all tasks know without a word: the last. Tasks take theirs from the other end."""
        return max(self)

    def without(self, ports: frozenset[int]) -> PortRange:
        return PortRange(self.first, self.last, self.promised | ports)

    def longest_run(self) -> tuple[int, int]:
        """First and last of the most ports in a row, for libraries that take a range without gaps."""
        numbered = itertools.groupby(enumerate(self), key=lambda pair: pair[1] - pair[0])
        runs = [[port for _, port in run] for _, run in numbered]
        longest = max(runs, key=len)
        return longest[0], longest[-1]


class PortsUsedUp(BadInput):
    """Every port of the range is taken at this address."""

    def __init__(self, host: str, ports: PortRange) -> None:
        super().__init__(f"every port of --ports={ports} is taken at {host}; give a larger range, the same everywhere.")


def parse_ports(text: str) -> PortRange:
    """Read ``A-B``; for anything else AddressError says what is wrong."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if match is None:
        raise AddressError(f"{text!r} is not a range of ports; write FIRST-LAST, for example 4700-4799.")
    first, last = int(match[1]), int(match[2])
    if not 1024 <= first <= last <= 65535:
        raise AddressError(f"{text!r} is not a range within 1024 to 65535; write FIRST-LAST, for example 4700-4799.")
    return PortRange(first, last)


class ReservedPort:
    """A free port that others do not get: bound but not listening, so only a program that names it can use it."""

    def __init__(self, host: str = "127.0.0.1", ports: PortRange | None = None) -> None:
        """An empty ``host``: of all addresses, for a task that does not know its own yet."""
        self._held = contextlib.ExitStack()
        self._socket = _bind(host, 0, self._held) if ports is None else _first_free(host, ports, self._held)
        self.port = int(self._socket.getsockname()[1])
        self.address = str(Address(host, self.port))

    def is_taken(self) -> bool:
        """Whether something listens at it now."""
        try:
            self._socket.listen(1)
        except OSError:
            return True
        return False

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen_at(host: str, ports: PortRange | None, backlog: int = 128) -> socket.socket:
    """A listening socket at this address, at a port of the range, or at one that the kernel chooses."""
    with contextlib.ExitStack() as held:
        listener = _bind(host, 0, held) if ports is None else _first_free(host, ports, held)
        listener.listen(backlog)
        return listener.dup()


def _first_free(host: str, ports: PortRange, held: contextlib.ExitStack) -> socket.socket:
    for port in ports:
        with contextlib.ExitStack() as attempt:
            try:
                # Among those that share a range, the port belongs to whoever has it for UDP: several can bind a TCP
                # port on which nobody listens yet, and must be able to, because ended connections keep it for a while.
                _bind(host, port, attempt, socket.SOCK_DGRAM)
                bound = _bind(host, port, attempt)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            held.push(attempt.pop_all())
            return bound
    raise PortsUsedUp(host or "this machine", ports)


def _bind(
    host: str, port: int, held: contextlib.ExitStack, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    number = resolve(host)[0] if host else ip_address("0.0.0.0")
    bound = held.enter_context(socket.socket(socket.AF_INET6 if number.version == 6 else socket.AF_INET, kind))
    if kind == socket.SOCK_STREAM:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((str(number), port))
    return bound
