"""What a training thread reports that it is doing, and whose code it is in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Doing(StrEnum):
    """What the training thread of a task reports that it is doing."""

    STARTING = "starting"
    COMPUTING = "computing"
    USER_CODE = "user code"
    WAITING = "waiting"
    INPUT = "input"
    CHECKPOINT = "checkpoint"
    BUSY = "busy"
    """What the program announced that takes long, such as an evaluation."""
    CALLING = "in a call"
    """It waits for the other workers in a call that all of them make."""
    FINISHING = "finishing"
    NOTHING = ""
    """A task without a training thread, or one that does not report."""


TRAINING = frozenset({Doing.USER_CODE, Doing.COMPUTING})
"""The thread runs the program's own code."""


class TaskPhase(StrEnum):
    """How far a task has come."""

    STARTING = "starting"
    IMPORTING_TORCH = "importing torch"
    CONNECTING = "connecting"
    COMPARING_SETTINGS = "comparing settings"
    RECEIVING_PARAMETERS = "receiving parameters"
    WARMING_UP = "warming up"
    TRAINING = "training"
    FINISHING = "finishing"
    CUT_OFF = "cut off: it runs, but has closed its descriptors and connections"
    """Set by its monitor."""
    ENDED = "ended"


class Code(StrEnum):
    """Whose code a stack is in."""

    USER = "user code"
    DEVICE = "device call"
    COMPILER = "compiler"
    COMMUNICATION = "communication"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class InputWait:
    """A training thread that waits for data. Times are on the monotonic clock."""

    file: str
    since: float
    read: int = 0
    """Records that were read for it since then."""
    read_at: float = 0.0
    """When the last of them was."""
    step_since: float = 0.0
    """When the thread had received its batch before."""
    pids: tuple[int, ...] = ()
    """The processes that read and decode."""


@dataclass(frozen=True, slots=True)
class Learning:
    """How far a worker's training has come, as its program tells."""

    batch: int = 0
    """Examples of one step on all workers; 0: not known."""
    loss: float | None = None
    step: int = -1
    """The step that the loss is of."""


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """A server writes its part of a checkpoint. Times are on the monotonic clock."""

    file: str
    since: float
    wrote_at: float
    """When its last bytes were written."""
