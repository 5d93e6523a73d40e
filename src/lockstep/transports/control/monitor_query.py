"""Who is at the address of a task: its monitor, with what it knows, or whatever was found there instead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import UNPROVEN, Reach
from lockstep.protocol.core.timing import ASK_SECONDS, PROBE_ALL_SECONDS
from lockstep.transports import phrases
from lockstep.transports.control.monitor_client import (
    Unreachable,
    describe,
    describe_with_snapshot,
    seconds_left,
)
from lockstep.transports.control.tcp_probe import Probe, probe, probe_program


@dataclass(frozen=True, slots=True)
class MonitorAnswer:
    """``description`` is what a monitor answered; without one, ``found`` is what is there instead."""

    found: Probe
    description: Description | None = None
    snapshot: bytes = b""
    """The monitor's snapshot, if it was requested and came."""


_A_MONITOR = Probe(Reach.LOCKSTEP)


def query_monitor(address: str, seconds: float = ASK_SECONDS) -> MonitorAnswer:
    """Ask the monitor at ``address`` for its description; takes about a second, or two for another program.

    ``seconds``: how long a monitor that accepts connections may take to answer.
    """
    probed = probe(address)
    if not probed.is_open:
        return MonitorAnswer(probed)
    try:
        return MonitorAnswer(_A_MONITOR, describe(address, seconds))
    except Unreachable as error:
        program = probe_program(address)
        return MonitorAnswer(Probe(Reach.MUTE, _why(error, seconds)) if program.is_open else program)


def query_monitor_quickly(address: str, seconds: float, deadline: float = math.inf) -> MonitorAnswer:
    """The same with the monitor's snapshot, where all tasks are asked at once and people wait for the answer.

    Another program is not asked what it is, and a slow name server takes no more time than all questions together.
    ``deadline``: see ``seconds_left``.
    """
    lookup = seconds_left(3 * seconds + PROBE_ALL_SECONDS, deadline)
    probed = probe(address, min(PROBE_ALL_SECONDS, seconds), lookup_seconds=lookup)
    if not probed.is_open:
        return MonitorAnswer(probed)
    seconds = seconds_left(seconds, deadline)
    try:
        return MonitorAnswer(_A_MONITOR, *describe_with_snapshot(address, seconds, PROBE_ALL_SECONDS, deadline))
    except Unreachable as error:
        if error.reach in UNPROVEN:
            return MonitorAnswer(probe_program(address, PROBE_ALL_SECONDS))
        return MonitorAnswer(Probe(error.reach, _why(error, seconds)))


def _why(error: Unreachable, seconds: float) -> str:
    """Why what accepts connections is not a monitor that answers; continues from the address."""
    if error.reach is Reach.MUTE:
        return phrases.accepts_without_answer(seconds)
    return phrases.accepts_but(error.reason)
