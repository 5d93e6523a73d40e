"""How a task enters a job and leaves it: who it is, who is there, who is missing. ``messages.py`` has all messages."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import INITIAL_STEP, Incarnation, JobId, Step
from lockstep.protocol.core.placement import Homes


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that must be equal on all tasks."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Member:
    """One task of a view, and its incarnation."""

    task: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MissingTask:
    """A task that has not joined: where it should be, what was found there, since when (seconds), how often tried."""

    task: str
    address: str
    finding: str
    seconds: float
    attempts: int


@dataclass(frozen=True, slots=True)
class TransportAddress:
    """What ``Transport.address`` of one transport of a task published."""

    transport: str
    address: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link, in both directions: my task, incarnation and job (0: not known yet)."""

    task: str
    incarnation: Incarnation
    job: JobId
    version: str
    transports: tuple[TransportAddress, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What a monitor reports about its task; ``exit_code`` counts once ``exited`` is set (-9: killed by signal 9)."""

    task: str
    host: str
    monitor_pid: int
    pid: int
    incarnation: Incarnation
    phase: str
    phase_seconds: float
    task_address: str
    exited: bool
    exit_code: int
    version: str
    job: JobId
    leaver: str = ""
    leaving: int = 0
    """The task received this signal (``leaving.Departure``), as far as its monitor or the task knows; 0: none."""
    printed_seconds: float = 0.0
    """How long ago the task printed a whole report; 0: it has not. Tasks that have no link to it ask for this."""
    former: Incarnation = 0
    """The incarnation before the one that its monitor has started since: it is over, whatever the next one does."""


@dataclass(frozen=True, slots=True)
class Join:
    """Any task to the coordinator: this incarnation is here, with these settings."""

    task: str
    incarnation: Incarnation
    host: str
    pid: int
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Roster:
    """Coordinator to the tasks that joined: who is still missing, or was lost and is waited for."""

    missing: tuple[MissingTask, ...]


@dataclass(frozen=True, slots=True)
class View:
    """Coordinator to all: the cluster is complete; these are its members. A later number replaces an earlier one.

    The rest is for the receiver: the step it starts with (``INITIAL_STEP``: the chief brings the initial parameters),
    the small local state that a worker had before that step (empty: as the model was built), and the checkpoint that
    the servers start with (empty: none).

    ``shards`` and ``decisions`` (one): where the shards of the plan, and the coordinator's decisions, live in this
    view; empty where servers have no second homes.

    ``replays``, for a rank that comes back: ``state`` is what it had before the step before ``start``. That step is
    committed, and the rank makes its iteration once more for what follows from it on this rank alone.
    """

    job: JobId
    number: int
    members: tuple[Member, ...]
    start: Step = INITIAL_STEP
    state: bytes = b""
    checkpoint: str = ""
    shards: tuple[Homes, ...] = ()
    decisions: tuple[Homes, ...] = ()
    replays: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Coordinator to one task, or a called task to its caller: why you cannot take part."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Leaving:
    """Any task to the coordinator: I received this signal (``leaving.Departure``) and am leaving."""

    signal: int


@dataclass(frozen=True, slots=True)
class Left:
    """Coordinator to all others: this task received this signal and is leaving. To the task itself: you may leave."""

    task: str
    signal: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either end of a link, every second. Never counts as progress."""

    sent_at: float
