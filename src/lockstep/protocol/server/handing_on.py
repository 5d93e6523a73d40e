"""What a server hands on of its own buckets: what their versions are made of, and copies of them, to second homes.

``second_shard.py`` is the other end. That a version is known only once it is held there is for ``homed_machine.py``,
which asks this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import Apply, CopyBucket, Effect, Send, SendMean
from lockstep.protocol.core.events import BucketApplied, MeanMade, TransferEnded
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Step, TaskId
from lockstep.protocol.core.messages import HandOn, Holding, SecondWhole
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.server.ledger import Ledger, ServedBucketState
from lockstep.protocol.server.second_homes import HandedBucket, OtherServers, Places
from lockstep.protocol.server.second_shard import compares


class HandingOn:
    """A server's own buckets, as far as their second homes are concerned."""

    def __init__(self, task: TaskId, places: Places, others: OtherServers, ledgers: Mapping[BucketId, Ledger]) -> None:
        """``ledgers``: of the buckets that this server is the home of."""
        self.repeat_at: float | None = None
        """When to send again what no second home has answered."""
        self._task = task
        self._places = places
        self._others = others
        self._ledgers = ledgers
        self._handed: dict[BucketId, HandedBucket] = {}

    # -- what may be done with a bucket --

    def waits_for_second(self, bucket: BucketId) -> bool:
        """Whether nothing of this bucket may be known that its second home does not have."""
        return self._places.of(bucket).whole or self._handed[bucket].in_step

    def lags(self, bucket: BucketId) -> bool:
        """Whether the second home, which nobody may be ahead of, lacks a state that was loaded here."""
        return self.waits_for_second(bucket) and self._handed[bucket].is_outdated

    def may_make_next(self, bucket: BucketId) -> bool:
        """Whether nothing reads what the next version is written over, or made of."""
        handed = self._handed[bucket]
        return not (handed.flying or handed.lent or handed.copying or self.lags(bucket))

    def is_held(self, ledger: Ledger) -> bool:
        """Whether the version that was made here may be known."""
        return not self.waits_for_second(ledger.bucket) or self._handed[ledger.bucket].held > ledger.version

    def differing(self, bucket: BucketId) -> TaskId | None:
        """The second home, if it made something else of the same update."""
        handed = self._handed[bucket]
        return handed.second[0] if handed.differs and handed.second is not None else None

    # -- what becomes of it --

    def be_home(self, bucket: BucketId) -> None:
        self._handed.setdefault(bucket, HandedBucket())

    def hand_to_second(self, bucket: BucketId) -> None:
        """Its second home in this view; another one has nothing yet."""
        self._handed[bucket].hand_to(self._places.second_life(bucket))

    def begin(self, apply: Apply) -> Apply:
        """The next version is about to be made of this."""
        handed = self._handed[apply.bucket]
        mean = bool(apply.arrivals)
        handed.update = HandOn(apply.step, apply.bucket, mean, apply.rates, apply.without, apply.values)
        handed.is_ready, handed.sent, handed.digests = not mean, False, ("", "")
        return replace(apply, hands_on=mean, digests=compares(apply.step))

    def on_mean_made(self, event: MeanMade, now: float) -> list[Effect]:
        handed = self._handed.get(event.bucket)
        if handed is None or handed.update is None or handed.update.step != event.step:
            return []
        handed.is_ready = True
        return self._hand_on(event.bucket, now)

    def on_made(self, event: BucketApplied, now: float) -> list[Effect]:
        handed = self._handed[event.bucket]
        handed.digests, handed.since = (event.digest, handed.digests[1]), now
        # Where there was nothing to reduce, or another server had made the mean, this is the first word of it.
        return self._hand_on(event.bucket, now)

    def on_mean_left(self, event: TransferEnded) -> None:
        handed = self._handed[event.bucket]
        if not event.ok and handed.flying:
            handed.lent = True  # the link is about to be lost; it may have arrived
        handed.flying = False

    def on_holding(self, ledger: Ledger, said: Holding) -> bool:
        """Its second home has it up to this version. Returns whether a copy was on its way, and no longer is."""
        handed = self._handed[ledger.bucket]
        handed.held, handed.lent = max(handed.held, said.version), handed.lent and said.reads
        if handed.copying:
            handed.copying = False
            if (said.version, said.edition) == (handed.copied, handed.copied_edition):
                handed.held_edition = said.edition
                handed.in_step = not handed.is_outdated
            return True
        if said.version == ledger.version + 1:
            handed.digests = (handed.digests[0], said.digest)
        return False

    def on_known(self, bucket: BucketId) -> None:
        """Everybody may have the version: nothing of it is handed on any more."""
        self._handed[bucket].update = None
        if all(one.update is None for one in self._handed.values()):
            self.repeat_at = None

    def on_link_lost(self, second: TaskId) -> None:
        for bucket, handed in self._handed.items():
            if self._places.of(bucket).second_task == second:
                handed.lent = handed.lent or handed.flying
                handed.sent = handed.flying = handed.copying = False

    # -- handing on --

    def _hand_on(self, bucket: BucketId, now: float, *, again: bool = False) -> list[Effect]:
        handed, second = self._handed[bucket], self._places.of(bucket).second_task
        update = handed.update
        if update is None or not handed.is_ready or handed.held > update.step or second is None:
            return []
        if not self._others.reaches(second) or not self.waits_for_second(bucket) or (handed.sent and not again):
            return []
        grant = self._others.by_task[second].grant
        self.repeat_at = now + REPEAT_SECONDS
        effects: list[Effect] = [Send(second, update)] if again or not update.mean else []
        if update.mean and not handed.flying and grant is not None:
            handed.flying = True
            effects.append(SendMean(second, update.step, bucket, grant, update))
        handed.sent = bool(effects)
        return effects

    def hand_on_all(self, second: TaskId, now: float) -> list[Effect]:
        """Whatever this second home lacks."""
        mine = [bucket for bucket in self._ledgers if self._places.of(bucket).second_task == second]
        return [effect for bucket in mine for effect in self._hand_on(bucket, now)]

    def hand_on_again_if_due(self, now: float) -> list[Effect]:
        if self.repeat_at is None or now < self.repeat_at:
            return []
        self.repeat_at = None
        return [effect for bucket in self._ledgers for effect in self._hand_on(bucket, now, again=True)]

    # -- a second home that is new, or lacks a state that a program has loaded --

    def has_changed(self, bucket: BucketId) -> None:
        """A program has loaded another state of its optimizer."""
        self._handed[bucket].edition += 1

    def copy_next(self) -> list[Effect]:
        """In the background: one bucket after another. Only the one that is being copied waits for it."""
        if any(handed.copying for handed in self._handed.values()):
            return []
        for ledger in self._ledgers.values():
            handed, second = self._handed[ledger.bucket], self._places.of(ledger.bucket).second_task
            follows = self.waits_for_second(ledger.bucket) and not handed.is_outdated
            if second is None or follows or not self._others.reaches(second):
                continue
            if self._others.by_task[second].grant is None:
                continue  # it has no memory yet
            if ledger.is_closed or ledger.version <= INITIAL_STEP:
                continue  # once its next version is known, this is asked again
            handed.copying, handed.copied, handed.copied_edition = True, ledger.version, handed.edition
            return [CopyBucket(second, ledger.bucket, ledger.version, handed.edition)]
        return []

    def say_if_whole(self, coordinator: TaskId, committed: Step) -> list[Effect]:
        """Once a second home has all of a shard. A copy has no older version, and a worker that comes back may ask for
        the one after the last committed step: so that step must be the one that the copies contain."""
        effects: list[Effect] = []
        for shard, homes in enumerate(self._places.placement.shards):
            if homes.home != self._task.index or homes.second_task is None or homes.whole:
                continue
            handed = [self._handed[bucket] for bucket in self._ledgers if self._places.of(bucket) is homes]
            if all(one.in_step and one.copied <= committed + 1 for one in handed):
                effects.append(Send(coordinator, SecondWhole(shard, self._places.view)))
        return effects

    # -- what others may ask --

    def waits(self, step: Step) -> list[Wait]:
        late: dict[TaskId, list[float]] = {}
        for ledger in self._ledgers.values():
            second = self._places.of(ledger.bucket).second_task
            if ledger.state is ServedBucketState.HANDED_ON and second is not None:
                late.setdefault(second, []).append(self._handed[ledger.bucket].since)
        found: list[Wait] = []
        for second, times in late.items():
            state = phrases.buckets_outstanding(phrases.handed_on(), len(times))
            due = self.repeat_at or min(times) + REPEAT_SECONDS
            found.append(Wait(self._task, second, WaitKind.HOLDING, step, min(times), due, state))
        return found
