"""What a worker has: each bucket with its state, and what it knows of each server.

Step *s* needs every bucket at version *s* and yields a gradient that turns it into version *s+1*::

    WANTED    no version yet (only before version 0 has come)
    HELD      the version of the current step is here; backward has not filled the gradient yet
    PRODUCED  the gradient is filled, but may not leave: the server has not opened the step, or an earlier
              transfer of this bucket is not over
    OFFERED   a transfer was started; the server has not confirmed that it has it
    CONFIRMED the server has it (or there is no gradient in this step)

and from the last three it goes back to HELD when the next version arrives, since a server can make that only
from all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import Open, Ticket


class HeldBucketState(StrEnum):
    WANTED = "wanted"
    HELD = "held"
    PRODUCED = "produced"
    OFFERED = "offered"
    CONFIRMED = "confirmed"


class HeldBucketTrigger(StrEnum):
    ARRIVE = "version arrived"
    PRODUCE = "gradient produced"
    SKIP = "no gradient"
    START = "transfer started"
    FAIL = "transfer or link failed"
    CONFIRM = "server has it"
    REHOME = "another server has it"
    NEXT_LIFE = "its rank is back"


HELD_BUCKET_TRANSITIONS: Mapping[tuple[HeldBucketState, HeldBucketTrigger], HeldBucketState] = MappingProxyType(
    {
        (HeldBucketState.WANTED, HeldBucketTrigger.ARRIVE): HeldBucketState.HELD,
        # The chief's initial parameters leave before any version is here.
        (HeldBucketState.WANTED, HeldBucketTrigger.PRODUCE): HeldBucketState.PRODUCED,
        # Where steps complete without this worker, a version may be replaced before it was used.
        (HeldBucketState.HELD, HeldBucketTrigger.ARRIVE): HeldBucketState.HELD,
        (HeldBucketState.HELD, HeldBucketTrigger.PRODUCE): HeldBucketState.PRODUCED,
        (HeldBucketState.HELD, HeldBucketTrigger.SKIP): HeldBucketState.CONFIRMED,
        # Taken back before the seal.
        (HeldBucketState.PRODUCED, HeldBucketTrigger.SKIP): HeldBucketState.CONFIRMED,
        (HeldBucketState.OFFERED, HeldBucketTrigger.SKIP): HeldBucketState.CONFIRMED,
        (HeldBucketState.CONFIRMED, HeldBucketTrigger.SKIP): HeldBucketState.CONFIRMED,
        (HeldBucketState.PRODUCED, HeldBucketTrigger.PRODUCE): HeldBucketState.PRODUCED,
        (HeldBucketState.PRODUCED, HeldBucketTrigger.START): HeldBucketState.OFFERED,
        (HeldBucketState.PRODUCED, HeldBucketTrigger.CONFIRM): HeldBucketState.CONFIRMED,
        (HeldBucketState.PRODUCED, HeldBucketTrigger.ARRIVE): HeldBucketState.HELD,
        # Edited after it left: it must be sent again.
        (HeldBucketState.OFFERED, HeldBucketTrigger.PRODUCE): HeldBucketState.PRODUCED,
        (HeldBucketState.OFFERED, HeldBucketTrigger.FAIL): HeldBucketState.PRODUCED,
        (HeldBucketState.OFFERED, HeldBucketTrigger.CONFIRM): HeldBucketState.CONFIRMED,
        (HeldBucketState.OFFERED, HeldBucketTrigger.ARRIVE): HeldBucketState.HELD,
        # What a server had is lost with it, unless its second home has the next version.
        (HeldBucketState.CONFIRMED, HeldBucketTrigger.REHOME): HeldBucketState.PRODUCED,
        (HeldBucketState.OFFERED, HeldBucketTrigger.REHOME): HeldBucketState.PRODUCED,
        # A rank that comes back needs every gradient of the open step again, also of a mean that is here: others may
        # not have it.
        (HeldBucketState.HELD, HeldBucketTrigger.NEXT_LIFE): HeldBucketState.PRODUCED,
        (HeldBucketState.PRODUCED, HeldBucketTrigger.NEXT_LIFE): HeldBucketState.PRODUCED,
        (HeldBucketState.OFFERED, HeldBucketTrigger.NEXT_LIFE): HeldBucketState.PRODUCED,
        (HeldBucketState.CONFIRMED, HeldBucketTrigger.NEXT_LIFE): HeldBucketState.PRODUCED,
        (HeldBucketState.CONFIRMED, HeldBucketTrigger.PRODUCE): HeldBucketState.PRODUCED,
        (HeldBucketState.CONFIRMED, HeldBucketTrigger.ARRIVE): HeldBucketState.HELD,
    }
)


@dataclass(slots=True)
class HeldBucket:
    """One bucket as this worker has it."""

    id: BucketId
    server: TaskId
    """Its home."""
    state: HeldBucketState = HeldBucketState.WANTED
    version: int = INITIAL_STEP
    edition: int = -1
    busy: bool = False
    offered_at: float = 0.0
    offers: int = 0
    shard: int = 0
    """The number of its home in the plan; with second homes, its home may be another server."""
    absent: bool = False
    """It was sealed without a gradient in this step."""

    def go(self, trigger: HeldBucketTrigger) -> None:
        self.state = advance(HELD_BUCKET_TRANSITIONS, self.state, trigger)

    def fail(self) -> None:
        """What was on its way, if anything, may not arrive."""
        if self.state is HeldBucketState.OFFERED:
            self.go(HeldBucketTrigger.FAIL)

    def move(self, home: TaskId) -> None:
        """What was delivered to its home, or offered, must be sent to the next one."""
        self.server, self.busy, self.offers = home, False, 0
        delivered = self.state is HeldBucketState.CONFIRMED and self.edition >= 0 and not self.absent
        if delivered or self.state is HeldBucketState.OFFERED:
            self.go(HeldBucketTrigger.REHOME)


@dataclass(slots=True)
class ServerSide:
    """What this worker knows of one server."""

    id: TaskId
    incarnation: Incarnation = 0
    linked: bool = False
    grant: Ticket | None = None
    open_step: Step = INITIAL_STEP - 1
    early_open: Open | None = None
    """It came before the view that it belongs to, and counts in that one."""
    buckets: list[HeldBucket] = field(default_factory=list)
    awaited: int = 0
    """How many of its buckets are not at the version that was asked for."""
    since: float = 0.0
    repeat_at: float = 0.0

    def lose_link(self) -> None:
        self.linked, self.grant, self.open_step, self.early_open = False, None, INITIAL_STEP - 1, None
        for bucket in self.buckets:
            bucket.busy = False
            bucket.fail()
