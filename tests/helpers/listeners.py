"""The listening sockets of a running job, found in the kernel and not in a list of ours."""

from __future__ import annotations

from collections.abc import Iterable

from helpers.programs import Program
from lockstep.runtime.listening import ListeningSocket, listening_sockets


def listeners_of(programs: Iterable[Program]) -> tuple[ListeningSocket, ...]:
    """Every TCP socket at which these programs, or what they have started, accept connections."""
    return listening_sockets(program.pid for program in programs)


def elsewhere(sockets: Iterable[ListeningSocket], host: str) -> list[ListeningSocket]:
    """Those that are not at this address, and only there."""
    return [one for one in sockets if one.address != host]


def outside(sockets: Iterable[ListeningSocket], first: int, last: int, *listed: str) -> list[ListeningSocket]:
    """Those that are neither in the range nor at one of the listed addresses."""
    return [one for one in sockets if not first <= one.port <= last and str(one) not in listed]
