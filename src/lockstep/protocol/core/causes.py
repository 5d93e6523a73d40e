"""Why something ended, as values: the cause decides what follows; its text is only for people.

No exit code, verdict or retry ever depends on the text: it may be reworded, or be empty, and everything works as
before (``tests/drill/test_bare_phrases.py`` runs the drills without any).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from lockstep.errors import EXIT_BAD_INPUT


class Cause(StrEnum):
    """Why a job is stuck or has ended; the value is what a report shows."""

    NEVER_STARTED = "never started"
    DEAD = "dead"
    OUT_OF_MEMORY = "out of memory"
    FROZEN = "frozen"
    FAILED = "failed with an error"
    STOPPED = "ended by a signal"
    USER_CODE = "stuck in user code"
    LOOPING = "looping in user code"
    BUSY = "busy, as the program announced"
    COMPILING = "compiling"
    DEVICE_CALL = "stuck in a device call"
    COMMUNICATION = "stuck in the communication layer"
    INPUT_STARVED = "input starved"
    CHECKPOINT_STUCK = "checkpoint stuck"
    DISK_FULL = "disk full"
    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"
    LINK_DOWN = "link down"
    ONE_WAY_LINK = "one-way link"
    NO_PATH = "no path by the transport that was asked for"
    SLOW_LINK = "slow link"
    STRAGGLER = "straggler"
    OUT_OF_STEP = "workers out of step or out of data"
    DRIFTED = "parameters differ between workers"
    HOMES_DIFFER = "both homes of a shard differ"
    MISMATCH = "model, settings or version mismatch"
    WIRING = "host lists or task indices do not fit"
    STALE_INCARNATION = "stale incarnation"
    LEFTOVER_SERVER = "leftover server of another job"
    DUPLICATE_TASK = "duplicate task"
    DEADLOCK = "deadlock cycle"
    NOT_ENTERED = "never entered the collective"
    OTHER_CALL = "ranks differ in a collective"
    OVERLOADED_SERVER = "overloaded server"
    UNKNOWN = "unknown"


LOSSES = frozenset({Cause.DEAD, Cause.OUT_OF_MEMORY, Cause.STALE_INCARNATION})
"""An incarnation has ended; whether the job ends too depends on how it handles losses."""

FINAL_REFUSALS = frozenset({Cause.MISMATCH, Cause.LEFTOVER_SERVER})
"""Another version, or a server of another job: asking again changes nothing."""


class Source(StrEnum):
    """Who has established a cause."""

    TASK = "task"
    """The task that failed reports it itself."""
    RULE = "rule"
    """The machines: a proven death, a refusal, a comparison."""
    VERDICT = "verdict"
    """A watchdog, from the evidence of all tasks; the report has been printed already."""
    STALL = "stall"
    """A watchdog, because nothing moved for too long; the report has been printed already."""


class ReportKind(StrEnum):
    """How much is known when a watchdog reports."""

    NOTICE = "notice"
    VERDICT = "verdict"
    STALL = "stall"
    ANSWER = "why"
    """To a person who asked."""
    INJECTED = "injected"
    """A drill has planted a fault."""
    REFUSED = "refused"
    """Callers were refused at a port or a door."""
    REPLICA = "replica"
    """Servers with second homes: not everything has one now, or has one again."""


WITH_FILES = frozenset({ReportKind.VERDICT, ReportKind.STALL})
"""For reports that leave files behind."""
SPOKEN = frozenset({ReportKind.NOTICE, *WITH_FILES})
"""What a watchdog reports without being asked."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an incarnation, a link or a job ended. ``peer`` is the other task involved, if there is one; ``host``,
    ``pid`` and ``exit_code`` (-9: killed by signal 9) describe the process that ended, where known."""

    cause: Cause
    text: str = ""
    source: Source = Source.RULE
    peer: str = ""
    host: str = ""
    pid: int = 0
    exit_code: int = 0

    @property
    def reported(self) -> bool:
        """A watchdog has already printed a whole report."""
        return self.source in (Source.VERDICT, Source.STALL)

    @property
    def own_error(self) -> bool:
        """The task that failed reported it itself: exit code 1 instead of 3."""
        return self.source is Source.TASK

    @property
    def refuses_to_return(self) -> bool:
        """The process ended because it cannot start (no intact checkpoint, for example), and nothing restarts it."""
        return self.exit_code == EXIT_BAD_INPUT

    def worded(self, text: str) -> Reason:
        """The same with another text."""
        return replace(self, text=text)


NO_REASON = Reason(Cause.UNKNOWN)
"""The reason of something that ended well."""


def link_down(text: str) -> Reason:
    """The reason of a link that has ended; its peer may still be alive."""
    return Reason(Cause.LINK_DOWN, text)


def own_error(text: str, cause: Cause = Cause.FAILED) -> Reason:
    """The reason of a task that reports its own failure."""
    return Reason(cause, text, Source.TASK)
