"""What a training thread reports that it is doing, and whose code it is in."""

from __future__ import annotations

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
    ENDED = "ended"


class Code(StrEnum):
    """Whose code a stack is in."""

    USER = "user code"
    DEVICE = "device call"
    COMPILER = "compiler"
    COMMUNICATION = "communication"
    UNKNOWN = ""
