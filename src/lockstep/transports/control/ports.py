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
        self._socket = _bound(host, ports)
        self.port = int(self._socket.getsockname()[1])
        self.address = str(Address(host, self.port))

    def is_taken(self) -> bool:
        """Whether something listens at it now."""
        try:
            self._socket.listen(1)
        except OSError:
            return True
        return False

    def listen(self, backlog: int) -> socket.socket:
        """Listen at it; the caller closes the socket."""
        self._socket.listen(backlog)
        return self._socket

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen_at(host: str, ports: PortRange | None, backlog: int = 128) -> socket.socket:
    """A listening socket at this address, at a port of the range, or at one that the kernel chooses."""
    return ReservedPort(host, ports).listen(backlog)


def _bound(host: str, ports: PortRange | None) -> socket.socket:
    if ports is None:
        bound = _bind(host, 0, shared=False)
        assert bound is not None
        return bound
    # First what nobody has, then what only connections that have ended still keep.
    for shared, port in itertools.product((False, True), ports):
        bound = _bind(host, port, shared=shared)
        if bound is not None:
            return bound
    raise PortsUsedUp(host or "this machine", ports)


def _bind(host: str, port: int, *, shared: bool) -> socket.socket | None:
    """None if the port is taken. Set after ``bind``, SO_REUSEADDR keeps the port from others who do it this way, and
    lets the program that was promised the port listen there."""
    family = socket.AF_INET6 if host and resolve(host)[0].version == 6 else socket.AF_INET
    with contextlib.ExitStack() as unwind:
        attempt = unwind.enter_context(socket.socket(family, socket.SOCK_STREAM))
        if shared:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((str(resolve(host)[0]) if host else "", port))
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                return None
            raise
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unwind.pop_all()
        return attempt
