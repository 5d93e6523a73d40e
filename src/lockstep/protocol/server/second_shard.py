"""What a server is the second home of: it makes each version of what the home hands on, and says when it has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.protocol.core.effects import Apply, Effect, GiveBack, Send, TakeBucket
from lockstep.protocol.core.events import BucketApplied, BucketTaken, MeanArrived
from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import BucketCopy, HandOn, Holding
from lockstep.protocol.server.second_homes import Places, SecondBucket

DIGEST_EVERY = 50
"""After how many steps both homes compare what they made."""


def compares(step: Step) -> bool:
    """Whether both homes compare what they make in this step."""
    return (step + 1) % DIGEST_EVERY == 0


class SecondShard:
    """The buckets that other servers hand on to this one."""

    def __init__(self, places: Places, journal: Journal, reaches: Callable[[TaskId | None], bool]) -> None:
        self.buckets: dict[BucketId, SecondBucket] = {}
        self._places = places
        self._journal = journal
        self._reaches = reaches

    def _is_home(self, peer: TaskId, bucket: BucketId) -> bool:
        return bucket in self.buckets and self._places.of(bucket).home_task == peer

    def on_handed_on(self, home: TaskId, update: HandOn, now: float) -> list[Effect]:
        if not self._is_home(home, update.bucket):
            return []
        here = self.buckets[update.bucket]
        if update.step < here.version:
            return [Send(home, Holding(update.bucket, here.version, edition=here.edition))]
        if update.step == here.version and not here.making:
            here.update = update
        return self._make_if_possible(home, update.bucket, now)

    def on_mean(self, event: MeanArrived, now: float) -> list[Effect]:
        here = self.buckets.get(event.bucket)
        wanted = here is not None and self._is_home(event.peer, event.bucket)
        if here is None or not wanted or here.making or event.step != here.version:
            return [GiveBack(event.arrival)]
        effects: list[Effect] = [GiveBack(here.arrival)] if here.arrival else []
        here.arrival = event.arrival
        self._journal.record(now, Happening.ARRIVED, event.step, event.bucket, event.peer)
        return effects + self._make_if_possible(event.peer, event.bucket, now)

    def _make_if_possible(self, home: TaskId, bucket: BucketId, now: float) -> list[Effect]:
        here = self.buckets[bucket]
        update = here.update
        if update is None or here.making or (update.mean and not here.arrival):
            return []
        here.making = True
        arrivals, here.arrival = ((here.arrival,) if update.mean else ()), 0
        giving = (home,) if update.mean else ()
        slots = (update.step % 2, (update.step + 1) % 2)
        self._journal.record(now, Happening.CONSUMED, update.step, bucket, home)
        apply = Apply(update.step, bucket, giving, arrivals, 1, update.rates, *slots, update.without, update.values)
        return [replace(apply, digests=compares(update.step))]

    def on_made(self, event: BucketApplied, now: float) -> list[Effect]:
        here = self.buckets[event.bucket]
        here.version, here.update, here.making = event.step + 1, None, False
        self._journal.record(now, Happening.PRODUCED, here.version, event.bucket)
        return self._say_holding(event.bucket, event.digest)

    def _say_holding(self, bucket: BucketId, digest: str = "") -> list[Effect]:
        home = self._places.of(bucket).home_task
        here = self.buckets[bucket]
        said = Holding(bucket, here.version, digest, here.edition)
        return [Send(home, said)] if self._reaches(home) else []

    # -- if it is new --

    def on_copy(self, home: TaskId, part: BucketCopy) -> list[Effect]:
        """A part of a bucket as its home has it; with the last one it can be taken."""
        if not self._is_home(home, part.bucket):
            return []
        here = self.buckets[part.bucket]
        if here.making:
            return []  # of a copy that was begun over a former link: when it is taken, its home hears of that
        if (part.version, part.edition) <= (here.version, here.edition):
            return self._say_holding(part.bucket)
        if part.offset == 0:
            here.parts.clear()
        if part.offset != len(here.parts):
            return []
        here.parts += part.data
        if len(here.parts) < part.total:
            return []
        data, here.parts = bytes(here.parts), bytearray()
        here.making, here.taking = True, part.edition
        return [TakeBucket(part.bucket, part.version, data)]

    def on_taken(self, event: BucketTaken, now: float) -> list[Effect]:
        here = self.buckets.get(event.bucket)
        if here is None:
            return []
        here.version, here.making, here.update, here.edition = event.version, False, None, here.taking
        self._journal.record(now, Happening.ARRIVED, event.version, event.bucket, cause="a copy")
        return self._say_holding(event.bucket)
