"""What ends a job, and when: one table, for the benchmark and for your own program.

Every cause has a row. The watchdogs, the simulator and the reports read it; ``docs/when-a-job-hangs.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.causes import Cause


class Ends(StrEnum):
    """When a cause that is proven ends the job."""

    AT_ONCE = "at once"
    """Waiting longer changes nothing."""
    AFTER_STALL = "after --stall_after"
    """It may end on its own: a debugger detaches, a network comes back."""
    AFTER_USER_CODE = "after --user_code_timeout"
    """The program does something that nobody but its author can judge, and which may well end."""
    NEVER = "never"
    """The job continues, only slower."""


ENDS: Mapping[Cause, Ends] = MappingProxyType(
    {
        Cause.DEAD: Ends.AT_ONCE,
        Cause.OUT_OF_MEMORY: Ends.AT_ONCE,
        Cause.FAILED: Ends.AT_ONCE,
        Cause.STOPPED: Ends.AT_ONCE,
        Cause.DISK_FULL: Ends.AT_ONCE,
        Cause.OUT_OF_STEP: Ends.AT_ONCE,
        Cause.DRIFTED: Ends.AT_ONCE,
        Cause.HOMES_DIFFER: Ends.AT_ONCE,
        Cause.MISMATCH: Ends.AT_ONCE,
        Cause.WIRING: Ends.AT_ONCE,
        Cause.STALE_INCARNATION: Ends.AT_ONCE,
        Cause.LEFTOVER_SERVER: Ends.AT_ONCE,
        Cause.DUPLICATE_TASK: Ends.AT_ONCE,
        Cause.DEADLOCK: Ends.AT_ONCE,
        Cause.OTHER_CALL: Ends.AT_ONCE,
        Cause.NEVER_STARTED: Ends.AFTER_STALL,
        Cause.FROZEN: Ends.AFTER_STALL,
        Cause.DEVICE_CALL: Ends.AFTER_STALL,
        Cause.COMMUNICATION: Ends.AFTER_STALL,
        Cause.INPUT_STARVED: Ends.AFTER_STALL,
        Cause.CHECKPOINT_STUCK: Ends.AFTER_STALL,
        Cause.REQUEST_LOST: Ends.AFTER_STALL,
        Cause.ANSWER_LOST: Ends.AFTER_STALL,
        Cause.LINK_DOWN: Ends.AFTER_STALL,
        Cause.ONE_WAY_LINK: Ends.AFTER_STALL,
        Cause.NO_PATH: Ends.AFTER_STALL,
        Cause.NOT_ENTERED: Ends.AFTER_STALL,
        Cause.UNKNOWN: Ends.AFTER_STALL,
        Cause.USER_CODE: Ends.AFTER_USER_CODE,
        Cause.LOOPING: Ends.AFTER_USER_CODE,
        Cause.BUSY: Ends.NEVER,
        Cause.COMPILING: Ends.NEVER,
        Cause.SLOW_LINK: Ends.NEVER,
        Cause.STRAGGLER: Ends.NEVER,
        Cause.OVERLOADED_SERVER: Ends.NEVER,
    }
)


def _that_end(when: Ends) -> frozenset[Cause]:
    return frozenset(cause for cause, ends in ENDS.items() if ends is when)


ON_NAN_PARAMETERS = ("stop", "report")
"""What a job does when a parameter contains NaN or infinity: it ends, or says so once and goes on."""

CANNOT_HEAL = _that_end(Ends.AT_ONCE)
WARNINGS = _that_end(Ends.NEVER)
NOTICED = WARNINGS | _that_end(Ends.AFTER_USER_CODE)
"""Reported by a notice: nothing is known to be broken."""


def seconds_allowed(cause: Cause, stall_after: float, user_code_timeout: float) -> float:
    """How long a job may be without progress for this proven cause; infinity: for ever."""
    match ENDS[cause]:
        case Ends.AT_ONCE:
            return 0.0
        case Ends.AFTER_STALL:
            return stall_after
        case Ends.AFTER_USER_CODE:
            return user_code_timeout
        case Ends.NEVER:
            return float("inf")
