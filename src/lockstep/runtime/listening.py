"""Where processes of this machine listen, as the kernel knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from lockstep.transports.control.addresses import Address, interface_of, resolve


@dataclass(frozen=True, slots=True, order=True)
class ListeningSocket:
    """One TCP socket that accepts connections."""

    address: str
    port: int
    pid: int

    @property
    def everywhere(self) -> bool:
        """Whether it accepts connections on every interface."""
        return ip_address(self.address).is_unspecified

    def __str__(self) -> str:
        return str(Address(self.address, self.port))


def listening_sockets(pids: Iterable[int]) -> tuple[ListeningSocket, ...]:
    """The sockets of these processes and of all below them; a process that has ended has none."""
    return tuple(sorted({one for pid in pids for process in _family(pid) for one in _sockets(process)}))


def _family(pid: int) -> Iterator[psutil.Process]:
    try:
        first = psutil.Process(pid)
        yield first
        yield from first.children(recursive=True)
    except psutil.Error:
        return


def _sockets(process: psutil.Process) -> list[ListeningSocket]:
    try:
        found = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [
        ListeningSocket(str(one.laddr.ip), int(one.laddr.port), process.pid)
        for one in found
        if one.status == psutil.CONN_LISTEN
    ]


def address_here(host: str) -> str:
    """The number to bind for a host of the lists."""
    return str(resolve(host)[0])


def interface_here(host: str) -> str | None:
    """The interface that has this address; None if it stands for all of them, or is not of this machine."""
    return interface_of(host)
