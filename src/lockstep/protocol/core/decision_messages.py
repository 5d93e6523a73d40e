"""What a coordinator has decided, as its deputy holds it. ``messages.py`` has all messages."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.call_messages import CallComplete, CallMade
from lockstep.protocol.core.end_messages import End
from lockstep.protocol.core.ids import INITIAL_STEP, JobId, Step
from lockstep.protocol.core.joining_messages import Join
from lockstep.protocol.core.norm_messages import TotalNorm
from lockstep.protocol.core.placement import Homes


@dataclass(frozen=True, slots=True)
class StateBefore:
    """What a worker takes into the step after the committed one (a rank: into the committed one); ``stuck`` as in
    ``LocalState``."""

    task: str
    data: bytes
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Coordinator to its deputy, with second homes: all that it has decided. Nothing follows from a decision before
    the deputy holds it.

    ``view``, ``shards``, ``decisions``: as in ``View``. ``joins``: of the members, where they have changed since the
    last resolution that the deputy holds; empty otherwise. ``step``: the committed one. ``ends``: the end of the job,
    once it is decided. ``norms``: those that were decided and may be asked for again. ``calls``: how many calls of all
    workers are complete; each was told before (``KeptCall``). ``start`` (of ranks): the step that the job began with.
    """

    job: JobId
    number: int
    view: int
    shards: tuple[Homes, ...]
    decisions: tuple[Homes, ...]
    joins: tuple[Join, ...]
    step: Step
    states: tuple[StateBefore, ...]
    checkpoint: str
    ends: tuple[End, ...]
    norms: tuple[TotalNorm, ...] = ()
    calls: int = 0
    start: Step = INITIAL_STEP


@dataclass(frozen=True, slots=True)
class KeptCall:
    """Coordinator to its deputy, with second homes: the call ``number`` of this job is complete.

    ``first``: who came first, and ``made``: to what, without its value. ``committed``: the step at that time. ``anew``:
    the deputy forgets those that it was told before; all that count follow.
    """

    number: int
    first: str
    made: CallMade
    answer: CallComplete
    committed: Step
    anew: bool = False


@dataclass(frozen=True, slots=True)
class ResolutionHeld:
    """Deputy to coordinator: I hold the resolution of this number."""

    number: int
