"""The listening sockets of a running job, found in the kernel and not in a list of ours."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers.programs import Program
from lockstep.runtime.listening import ListeningSocket, listening_sockets
from lockstep.runtime.processes import descendants

_ACCEPTS = "00010000"
"""The flag of a listening socket in /proc/net/unix."""


def listeners_of(programs: Iterable[Program]) -> tuple[ListeningSocket, ...]:
    """Every TCP socket at which these programs, or what they have started, accept connections."""
    return listening_sockets(program.pid for program in programs)


def elsewhere(sockets: Iterable[ListeningSocket], host: str) -> list[ListeningSocket]:
    """Those that are not at this address, and only there."""
    return [one for one in sockets if one.address != host]


def outside(sockets: Iterable[ListeningSocket], first: int, last: int, *listed: str) -> list[ListeningSocket]:
    """Those that are neither in the range nor at one of the listed addresses."""
    return [one for one in sockets if not first <= one.port <= last and str(one) not in listed]


def doors_of(pids: Iterable[int]) -> dict[bytes, int]:
    """Every abstract unix socket at which these processes, or those below them, accept connections, with its owner."""
    owners: dict[str, int] = {}
    for pid in pids:
        for each in (pid, *(below.pid for below in descendants(pid))):
            with suppress(OSError):  # it has ended
                owners.update((str(link.readlink()), each) for link in Path(f"/proc/{each}/fd").iterdir())
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        b"\0" + words[7][1:].encode(): owners[f"socket:[{words[6]}]"]
        for words in lines
        if len(words) == 8 and words[3] == _ACCEPTS and words[7][0] == "@" and f"socket:[{words[6]}]" in owners
    }
