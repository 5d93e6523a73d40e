"""What a server is the second home of: it says when it has all that a version is made of, and makes it afterwards.

What it holds is as safe as what it has made: it makes it before it does anything else in the home's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.protocol.core.effects import Apply, Effect, GiveBack, Send, TakeBucket
from lockstep.protocol.core.events import BucketApplied, BucketTaken, MeanArrived
from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import BucketCopy, HandOn, Holding
from lockstep.protocol.server.second_homes import NOTHING, HeldUpdate, Places, SecondBucket

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
        self._early: dict[TaskId, list[BucketCopy]] = {}
        """Parts of a bucket whose second home this server is not yet, as far as it knows."""

    def is_home(self, peer: TaskId, bucket: BucketId) -> bool:
        return bucket in self.buckets and self._places.of(bucket).home_task == peer

    def on_handed_on(self, home: TaskId, update: HandOn, now: float) -> list[Effect]:
        if not self.is_home(home, update.bucket):
            return []
        here = self.buckets[update.bucket]
        if update.step < here.holds:
            return self._say_holding(update.bucket)
        if update.step == here.holds:
            here.update = update
        return self._hold_if_possible(update.bucket, now)

    def on_mean(self, event: MeanArrived, now: float) -> list[Effect]:
        here = self.buckets.get(event.bucket)
        if here is None or not self.is_home(event.peer, event.bucket) or event.step > here.holds:
            return [GiveBack(event.arrival)]
        if event.step < here.holds:
            return [GiveBack(event.arrival), *self._say_holding(event.bucket)]
        effects: list[Effect] = [GiveBack(here.arrival)] if here.arrival else []
        here.arrival = event.arrival
        if event.update is not None:
            here.update = event.update
        self._journal.record(now, Happening.ARRIVED, event.step, event.bucket, event.peer)
        return effects + self._hold_if_possible(event.bucket, now)

    def _hold_if_possible(self, bucket: BucketId, now: float) -> list[Effect]:
        """All that the next version is made of is here: that is said at once, and it is made when there is time."""
        here = self.buckets[bucket]
        update = here.update
        if update is None or (update.mean and not here.arrival):
            return []
        here.held.append(HeldUpdate(update, here.arrival))
        here.update, here.arrival = None, 0
        return self._say_holding(bucket) + (self._make_next(bucket, now) if len(here.held) == 1 else [])

    def _make_next(self, bucket: BucketId, now: float) -> list[Effect]:
        here, home = self.buckets[bucket], self._places.of(bucket).home_task
        if not here.held or here.taking:
            return []
        update, arrival = here.held[0]
        arrivals, giving = ((arrival,), (home,)) if update.mean else ((), ())
        slots = (update.step % 2, (update.step + 1) % 2)
        self._journal.record(now, Happening.CONSUMED, update.step, bucket, home)
        apply = Apply(update.step, bucket, giving, arrivals, 1, update.rates, *slots, update.without, update.values)
        return [replace(apply, digests=compares(update.step), in_background=True)]

    def on_made(self, event: BucketApplied, now: float) -> list[Effect]:
        here = self.buckets[event.bucket]
        here.held.popleft()
        here.version = event.step + 1
        self._journal.record(now, Happening.PRODUCED, here.version, event.bucket)
        says = event.digest or (here.owes_word and not here.held)
        effects = self._say_holding(event.bucket, event.digest) if says else []
        return effects + self._take_copy_if_possible(event.bucket) + self._make_next(event.bucket, now)

    def _say_holding(self, bucket: BucketId, digest: str = "") -> list[Effect]:
        """Where both homes compare what they make, only what was made."""
        home, here = self._places.of(bucket).home_task, self.buckets[bucket]
        if not self._reaches(home):
            return []
        compared = bool(here.held) and compares(here.held[-1].update.step)
        here.owes_word = here.owes_word and bool(here.held)
        return [Send(home, Holding(bucket, here.holds - compared, digest, here.edition, reads=bool(here.held)))]

    def on_home_up(self, home: TaskId) -> list[Effect]:
        """The link to the home of some buckets is there again."""
        self._early.pop(home, None)
        effects: list[Effect] = []
        for bucket, here in self.buckets.items():
            if self.is_home(home, bucket) and here.holds > NOTHING:
                here.owes_word = True
                effects += self._say_holding(bucket)
        return effects

    # -- copies: if it is new, or a program has loaded another state --

    def on_copy(self, home: TaskId, part: BucketCopy) -> list[Effect]:
        """A part of a bucket as its home has it; with the last one it can be taken. A home copies a bucket once, as
        soon as it knows of the view. Here the view may come later, or wait."""
        if not self.is_home(home, part.bucket):
            self._keep_early(home, part)
            return []
        here = self.buckets[part.bucket]
        if here.copy is not None:
            return []  # of a copy that was begun over a former link: when it is taken, its home hears of that
        if (part.version, part.edition) <= (here.holds, here.edition):
            return self._say_holding(part.bucket)
        if part.offset == 0:
            here.parts.clear()
        if part.offset != len(here.parts):
            return []
        here.parts += part.data
        if len(here.parts) < part.total:
            return []
        here.copy, here.parts = replace(part, data=bytes(here.parts)), bytearray()
        return self._take_copy_if_possible(part.bucket)

    def _keep_early(self, home: TaskId, part: BucketCopy) -> None:
        early = self._early.setdefault(home, [])
        if part.offset == 0:
            early.clear()  # it copies one after another
        early.append(part)

    def take_early_copies(self) -> list[Effect]:
        """The view has come: this server may be the second home of their buckets now."""
        early, self._early = self._early, {}
        return [effect for home, parts in early.items() for part in parts for effect in self.on_copy(home, part)]

    def _take_copy_if_possible(self, bucket: BucketId) -> list[Effect]:
        """After what is held before it was made: the home goes on as soon as that is held, and may copy then."""
        here = self.buckets[bucket]
        if here.copy is None or here.held or here.taking:
            return []
        here.taking = True
        return [TakeBucket(bucket, here.copy.version, here.copy.data)]

    def on_taken(self, event: BucketTaken, now: float) -> list[Effect]:
        here = self.buckets.get(event.bucket)
        if here is None or here.copy is None:
            return []
        here.version, here.edition, here.update = event.version, here.copy.edition, None
        here.copy, here.taking = None, False
        self._journal.record(now, Happening.ARRIVED, event.version, event.bucket, cause="a copy")
        return self._say_holding(event.bucket)
