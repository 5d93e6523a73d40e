"""What tasks of a job with second homes say to each other: one frozen dataclass per message, each idempotent.

A message is said *in* a view (``Stamped``). One of an earlier view is dropped, one of a later view is kept until that
view has come, and with every view each task says again all that is still open. So nothing that was meant for a former
home, or said by one, ever counts. A tensor is a number here: the memory that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.ids import BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.messages import Done, End, GroupRates, LocalState
from lockstep.protocol.core.placement import Placement

Members = tuple[tuple[TaskId, Incarnation], ...]
States = tuple[tuple[TaskId, bytes], ...]


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """Worker to every home: all that an update of this step depends on besides gradients.

    As in ``messages.Seal`` and ``messages.Rates``; ``clip`` is the coefficient that gradients are multiplied with: a
    value that is handed on, and never computed again from what one home happens to have.
    """

    step: Step
    absent: tuple[BucketId, ...] = ()
    without: tuple[int, ...] = ()
    void: bool = False
    values: bool = False
    rates: tuple[GroupRates, ...] = ()
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class GradientOf:
    """Worker to the home of ``bucket``: its gradient of ``step``."""

    step: Step
    bucket: BucketId
    tensor: int


@dataclass(frozen=True, slots=True)
class WantVersion:
    """Worker to every home: send me ``version`` of your buckets, except those of ``have``."""

    version: int
    have: tuple[BucketId, ...]


@dataclass(frozen=True, slots=True)
class VersionOf:
    """Home to worker. The second home holds this version, if there is one that is whole."""

    version: int
    bucket: BucketId
    tensor: int


@dataclass(frozen=True, slots=True)
class UpdateOf:
    """Home to second home: everything that made version ``step + 1`` of ``bucket`` out of version ``step``.

    ``digest``: of the values and the optimizer's state that it made, in the steps in which both homes compare them.
    """

    step: Step
    bucket: BucketId
    mean: int
    """The tensor of the mean gradient; of the values themselves where ``values`` is set; 0: no gradient at all."""
    rates: tuple[GroupRates, ...] = ()
    clip: float | None = None
    without: tuple[int, ...] = ()
    void: bool = False
    values: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class CopyOf:
    """Home to a second home that is not whole: a bucket as it is, with its optimizer's state."""

    bucket: BucketId
    version: int
    tensor: int
    state: int


@dataclass(frozen=True, slots=True)
class HeldTo:
    """Second home to home: I hold all that makes this bucket up to ``version``."""

    bucket: BucketId
    version: int


@dataclass(frozen=True, slots=True)
class ShardWhole:
    """Home to coordinator: the second home of this shard holds everything, and from now on I wait for it."""

    shard: int


@dataclass(frozen=True, slots=True)
class ShardsApplied:
    """Home to coordinator: all my shards have made step ``step``, and their second homes hold it."""

    step: Step


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Coordinator to every home; its deputy holds this decision."""

    step: Step


@dataclass(frozen=True, slots=True)
class DigestsDiffer:
    """Second home to coordinator: what I made of the same update is not what its home made."""

    step: Step
    bucket: BucketId


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """All that a coordinator has decided: whoever has this can coordinate."""

    serial: int
    view: int
    placement: Placement
    members: Members
    committed: Step
    states: States
    """What each worker takes into the step after the committed one."""
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """Coordinator to deputy: hold this."""

    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class DecisionHeld:
    """Deputy to coordinator."""

    serial: int


@dataclass(frozen=True, slots=True)
class Entering:
    """Any task to the coordinator: this incarnation wants to take part."""


@dataclass(frozen=True, slots=True)
class Follow:
    """A member to a task that is none: this server coordinates since view ``view``."""

    coordinator: TaskId
    view: int


@dataclass(frozen=True, slots=True)
class ViewOf:
    """Coordinator to every member. ``start`` and ``state``: where a member that is new in this view begins."""

    number: int
    placement: Placement
    members: Members
    committed: Step
    start: Step
    state: bytes


@dataclass(frozen=True, slots=True)
class Stamped:
    """A message, and the view that its sender was in."""

    view: int
    message: InView


InView = (
    UpdateFacts
    | GradientOf
    | WantVersion
    | VersionOf
    | UpdateOf
    | CopyOf
    | HeldTo
    | ShardWhole
    | ShardsApplied
    | StepCommitted
    | DigestsDiffer
    | LocalState
    | Done
)
ReplicaMessage = Stamped | Decided | DecisionHeld | Entering | Follow | ViewOf | End
