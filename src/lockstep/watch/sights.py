"""What is seen of each rank at one moment, as values: the evidence that ``judging.py`` decides by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from lockstep.flight.recording import Recording, StackLine
from lockstep.runtime.watch.kernel_tcp import Counted
from lockstep.watch.ranks import RankFacts, RankStatus


class Vitality(StrEnum):
    """What the kernel says of a rank's process."""

    RUNS = "runs"
    STOPPED = "stopped"
    GONE = "gone"
    UNSEEN = "never seen"
    """No process of this rank was ever found here, nor by another watcher."""
    UNKNOWN = "not known"
    """It runs on a host whose watcher does not answer."""


class Work(StrEnum):
    """Where the main thread of a rank stands, as its stack tells."""

    COLLECTIVE = "in a collective"
    JOINING = "joining its group"
    INPUT = "waiting for its input"
    PROGRAM = "in the program"
    NOT_SEEN = "not seen"


@dataclass(frozen=True, slots=True)
class Helper:
    """A process that a rank has started, such as one that loads data."""

    pid: int
    stopped: bool
    dead: bool
    busy: float
    """Share of one processor that it has used since the last look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSight:
    """One rank."""

    rank: int
    host: str = ""
    pid: int = 0
    life: Vitality = Vitality.UNSEEN
    state: str = ""
    """In the kernel's words."""
    exit_code: int | None = None
    """Of one that is gone; -9: killed by signal 9. None: not known."""
    ended: float = 0.0
    """When it was gone, in seconds since 1970."""
    status: RankStatus = field(default_factory=RankStatus)
    facts: RankFacts = field(default_factory=RankFacts)
    entered: bool = False
    """It has let us in: ``status`` and ``facts`` are its own."""
    busy: float = 0.0
    """Share of one processor that it has used since the last look."""
    runnable: bool = False
    """It runs, or would if its host were not so busy."""
    stack: tuple[StackLine, ...] = ()
    """Of its main thread, innermost first."""
    work: Work = Work.NOT_SEEN
    on_device: bool = False
    helpers: tuple[Helper, ...] = ()
    links: Mapping[str, Counted] = field(default_factory=dict)
    """The kernel's counters of its connections, by the address of the other end."""
    dump: bytes = b""
    """What its recorder gave; empty if it did not answer."""
    recording: Recording | None = None
    """The same, read."""

    @property
    def place(self) -> StackLine | None:
        """The innermost line of the program itself."""
        return next((line for line in self.stack if line.of_program), None)


class Ranks(Protocol):
    """The ranks of a job, on this host or on all."""

    @property
    def world(self) -> int: ...

    def steps(self) -> Mapping[int, tuple[int, float]]: ...

    def recordings(self) -> Mapping[int, Recording]: ...

    def sights(self, *, all_stacks: bool) -> Mapping[int, RankSight]: ...

    @property
    def silent_hosts(self) -> tuple[str, ...]: ...
