"""How the job, or a task's part of it, ends; and what is reported before. ``messages.py`` has all messages."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.causes import NO_REASON, Reason, ReportKind
from lockstep.protocol.core.ids import Incarnation, Step


@dataclass(frozen=True, slots=True)
class Lost:
    """Any task to the coordinator: this incarnation of ``task`` ended, and why; ``lives``: it is alive after all."""

    task: str
    incarnation: Incarnation
    reason: Reason
    lives: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to coordinator and servers: I have finished, after ``steps`` steps."""

    steps: Step


@dataclass(frozen=True, slots=True)
class Failed:
    """Any task to the coordinator: I cannot continue. ``culprit`` is the task that failed, if not the sender."""

    culprit: str
    step: Step
    reason: Reason


@dataclass(frozen=True, slots=True)
class End:
    """Coordinator to all: the job has ended, well or with the first real error.

    ``again``: start another incarnation, and with it the job, from the newest checkpoint.
    """

    ok: bool
    culprit: str
    step: Step
    reason: Reason = NO_REASON
    again: bool = False
    departure: int = 0
    """The signal (``leaving.Departure``) of the task that ended the job; 0: none."""


@dataclass(frozen=True, slots=True)
class Report:
    """Coordinator to all: what it found out about an unusually long wait.

    ``diagnosis`` is the whole of it as JSON (``diagnose/verdict.py``). The coordinator prints it; a task that does not
    receive ``Printed`` in time prints it itself.
    """

    kind: ReportKind
    text: str
    diagnosis: bytes


@dataclass(frozen=True, slots=True)
class Printed:
    """Coordinator to all: the report of this kind about this culprit is on my terminal."""

    kind: ReportKind
    culprit: str
