"""What a server holds and hands out: versions of its buckets to workers, its progress to the coordinator.

``server_machine.py`` adds the other half: incoming gradients and what is made of them. Version *v* of a bucket lies in
one of the slots of the store. A transfer reads its slot until the sender's end of it is over, and as long as one does,
no update may write there.
"""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, SaveShard, Send, SendVersion
from lockstep.protocol.core.events import LinkLost, ShardSaved, TransferEnded
from lockstep.protocol.core.ids import INITIAL_STEP, NOTHING_TO_APPLY, BucketId, ClusterShape, Role, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.keys import TensorKey, gradient_name
from lockstep.protocol.core.messages import Applied, Done, Failed, Message, Pull, Saved
from lockstep.protocol.core.timing import REPEAT_SECONDS, RESEND_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.server.contributing import ContributingWorkers
from lockstep.protocol.server.ledger import Ledger, ServedBucketState, WorkerSide


class Shard:
    """The buckets of one server and what each worker has asked for."""

    def __init__(self, task: TaskId, shape: ClusterShape, journal: Journal, aggregate: int | None = None) -> None:
        self.task = task
        self.shape = shape
        self.coordinator = shape.coordinator
        """The task that coordinates; with second homes it may change."""
        self.contributing = ContributingWorkers(shape.worker_ids(), aggregate)
        self.step: Step = INITIAL_STEP
        """The step that this shard is open for: all its buckets are at this version or beyond."""
        self.committed: Step = INITIAL_STEP - 1
        self.dropped: dict[TaskId, int] = {}
        """Duplicate and stale gradients by sender: refused, and counted."""
        self._journal = journal if task.role is Role.SERVER else journal.of_share()
        self._ledgers: dict[BucketId, Ledger] = {}
        self._workers = {w: WorkerSide(w) for w in shape.worker_ids()}
        self._applied_at: float | None = None
        """Since when this shard has been waiting for its step to be committed."""
        self._applied: Step = INITIAL_STEP - 1
        self._failure: Failed | None = None
        self._repeat_at: float | None = None
        """When to send the coordinator again what it has not answered."""
        self._save_version: int = INITIAL_STEP
        """The newest version that was to be saved."""
        self._saved: Saved | None = None

    @property
    def slots(self) -> int:
        """How many values of each bucket the store must have room for."""
        return 2

    def _expected_step(self, side: WorkerSide) -> Step:  # noqa: ARG002 - each worker has its own step in async mode
        return self.step

    def _owed_buckets(self, side: WorkerSide) -> list[BucketId]:
        """The buckets whose gradient of the open step this worker has not delivered."""
        if side.done is not None or not self.contributing.includes(side.id, self.step):
            return []
        return [
            ledger.bucket
            for ledger in self._ledgers.values()
            if ledger.version == self.step
            and ledger.state is ServedBucketState.COLLECTING
            and side.id not in ledger.arrived
        ]

    def _drop(self, sender: TaskId, step: Step, bucket: BucketId, why: str, now: float) -> None:
        self.dropped[sender] = self.dropped.get(sender, 0) + 1
        self._journal.record(now, Happening.DROPPED, step, bucket, sender, why)

    # -- parameters go out --

    def _on_pull(self, side: WorkerSide, pull: Pull, now: float) -> list[Effect]:
        if side.pull is not None and pull.version < side.pull.version:
            self._journal.record(now, Happening.DROPPED, pull.version, peer=side.id, cause="stale pull")
            return []
        if side.pull is None or pull.version > side.pull.version:
            side.pulled.clear()
        side.pull = pull
        self._journal.record(now, Happening.REQUEST_SEEN, pull.version, peer=side.id)
        effects: list[Effect] = []
        # Low numbers are the last layers; the next forward needs the first layers first.
        for bucket in sorted(self._ledgers, reverse=True):
            effects += self._deliver(side, self._ledgers[bucket], now)
        return effects

    def _deliver(self, side: WorkerSide, ledger: Ledger, now: float) -> list[Effect]:
        pull = side.pull
        if pull is None or not side.linked or ledger.bucket in pull.have:
            return []
        if not self._readable(ledger, pull.version, side) or (pull.version, ledger.bucket) in side.flying:
            return []
        last, times = side.pulled.get(ledger.bucket, (0.0, 0))
        if times and not self._may_repeat(now - last, times):
            return []
        slot = self._slot(ledger, pull.version)
        side.pulled[ledger.bucket] = (now, times + 1)
        side.flying[pull.version, ledger.bucket] = slot
        ledger.readers[slot] += 1
        self._journal.record(now, Happening.IN_FLIGHT, pull.version, ledger.bucket, side.id)
        return [SendVersion(side.id, pull.version, ledger.bucket, slot, pull.ticket, pull.in_place)]

    def _may_repeat(self, seconds: float, times: int) -> bool:
        """Whether a version that left, but is still asked for, may be sent again."""
        return seconds >= RESEND_SECONDS * 2.0 ** (times - 1)

    def _slot(self, ledger: Ledger, version: int) -> int:
        return ledger.slot_of(version)

    def _readable(self, ledger: Ledger, version: int, side: WorkerSide) -> bool:  # noqa: ARG002 - see the async machine
        if self.slots == 1 and ledger.is_closed:
            return False  # the next version is being written over it
        if version == ledger.version:
            return version > INITIAL_STEP
        # The version before stays readable in its slot until the next update may overwrite it.
        kept = version == ledger.version - 1 and self.slots > 1
        return kept and version > INITIAL_STEP and not ledger.is_closed

    def _transfer_over(self, event: TransferEnded, now: float) -> Ledger | None:
        """A reader of a slot is gone; returns the bucket it read, if it counted as a reader."""
        side = self._workers[event.peer]
        slot = side.flying.pop((event.number, event.bucket), None)
        if slot is None:
            return None
        ledger = self._ledgers[event.bucket]
        ledger.readers[slot] -= 1
        if not event.ok and side.pull is not None and side.pull.version == event.number:
            # It did not leave: the next request for it starts it again at once.
            side.pulled.pop(event.bucket, None)
        happening = Happening.SENT if event.ok else Happening.DROPPED
        self._journal.record(now, happening, event.number, event.bucket, event.peer)
        return ledger

    def _lose_link(self, side: WorkerSide, event: LinkLost, now: float) -> list[Ledger]:
        """Everything in flight to this worker is void; returns the buckets that lost a reader."""
        self._journal.record(now, Happening.LINK_LOST, peer=event.peer, cause=event.reason)
        side.linked, side.granted, side.pull = False, False, None
        side.pulled.clear()
        for (_, bucket), slot in side.flying.items():
            self._ledgers[bucket].readers[slot] -= 1
        freed = sorted({bucket for _, bucket in side.flying})
        side.flying.clear()
        return [self._ledgers[bucket] for bucket in freed]

    # -- what the coordinator must know --

    def _unheard(self) -> list[Message]:
        """What the coordinator has not confirmed."""
        unheard: list[Message] = []
        # A server without a bucket stays at the step that the job began with: its commit shows that the coordinator
        # knows of it. Steps before that one, of a checkpoint, were committed by another coordinator.
        shown = self.step if self._applied == NOTHING_TO_APPLY else self._applied
        if self.committed < shown:
            unheard.append(Applied(self._applied))
        elif not self.contributing.is_known(self.step):
            # It may have received this, and its decision may have been lost in transit.
            unheard.append(Applied(self._applied))
        if self._failure is not None:
            unheard.append(self._failure)
        return unheard

    def _say_what_is_unheard(self, now: float) -> list[Effect]:
        unheard = self._unheard()
        self._repeat_at = now + REPEAT_SECONDS if unheard else None
        return [Send(self.coordinator, message) for message in unheard]

    # -- checkpoints --

    def _save(self, version: int) -> list[Effect]:
        """Save each version once; a repeated request is answered with the result."""
        if version <= self._save_version:
            known = self._saved is not None and self._saved.version == version
            return self._say_saved() if known else []
        self._save_version = version
        late = self._first_past(version)
        if late is not None:
            self._saved = Saved(version, "", 0, "", phrases.bucket_is_past(late.bucket, late.version))
            return self._say_saved()
        return [SaveShard(version, tuple(self._ledgers))]

    def _first_past(self, version: int) -> Ledger | None:
        """The first bucket that cannot be saved in this version."""
        return next((b for b in self._ledgers.values() if b.version != version or b.is_closed), None)

    def _on_shard_saved(self, event: ShardSaved) -> list[Effect]:
        self._saved = event.saved
        return self._say_saved()

    def _say_saved(self) -> list[Effect]:
        return [] if self._saved is None else [Send(self.coordinator, self._saved)]

    def _break(self, culprit: TaskId, reason: Reason, now: float) -> list[Effect]:
        if self._failure is not None:
            return []
        self._failure = Failed(str(culprit), self.step, reason)
        return self._say_what_is_unheard(now)

    def _on_done(self, side: WorkerSide, done: Done, now: float) -> list[Effect]:
        side.done = done.steps
        self._journal.record(now, Happening.ENDED, done.steps, peer=side.id, cause="this worker has finished")
        return self._out_of_step(now)

    def _out_of_step(self, now: float) -> list[Effect]:
        """A worker that has stopped owes a gradient that another has already sent: report who stopped where."""
        if self.step == INITIAL_STEP or not any(ledger.arrived for ledger in self._ledgers.values()):
            # The usual end: all stop at the same step. Each of a thousand workers reports this to each server.
            return []
        stopped = [w for w in self._workers.values() if w.done is not None and w.done <= self.step]
        going = [
            w
            for w in self._workers.values()
            if w.done is None and any(w.id in ledger.arrived for ledger in self._ledgers.values())
        ]
        if not stopped or not going:
            return []
        first = stopped[0]
        text = phrases.stopped_early(first.id, first.done or 0, going[0].id, self.step)
        return self._break(first.id, Reason(Cause.OUT_OF_STEP, text, peer=str(going[0].id)), now)

    # -- what others may ask --

    def waits(self) -> list[Wait]:
        found: list[Wait] = []
        for side in self._workers.values():
            owed = self._owed_buckets(side)
            if not owed:
                continue
            key = TensorKey(side.id, side.incarnation, self.task, gradient_name(owed[0]))
            asked = phrases.buckets_outstanding(phrases.asked_for(), len(owed))
            state = asked if side.granted else phrases.not_connected()
            step, kind = self._expected_step(side), WaitKind.GRADIENT
            found.append(Wait(self.task, side.id, kind, step, side.since, side.repeat_at, state, key, owed[0]))
        if self._applied_at is not None:
            step, due, state = self.step - 1, self._applied_at + REPEAT_SECONDS, phrases.applied_here_only()
            found.append(Wait(self.task, self.coordinator, WaitKind.COMMIT, step, self._applied_at, due, state))
        return found

    def snapshot(self) -> dict[str, object]:
        return {
            "task": str(self.task),
            "step": self.step,
            "committed": self.committed,
            "dropped": {str(task): count for task, count in self.dropped.items()},
            "buckets": [
                {
                    "id": ledger.bucket,
                    "state": ledger.state.value,
                    "version": ledger.version,
                    "arrived": [str(task) for task in ledger.arrived],
                    "readers": list(ledger.readers),
                }
                for ledger in self._ledgers.values()
            ],
            "workers": [
                {
                    "task": str(side.id),
                    "linked": side.linked,
                    "granted": side.granted,
                    "expected_step": self._expected_step(side),
                    "pulls": side.pull.version if side.pull else None,
                    "done": side.done,
                }
                for side in self._workers.values()
            ],
        }

    def check(self) -> None:
        flying: dict[tuple[BucketId, int], int] = {}
        for side in self._workers.values():
            assert side.linked or not side.flying, f"{side.id} is not linked, and transfers to it count as readers"
            for (_, bucket), slot in side.flying.items():
                flying[bucket, slot] = flying.get((bucket, slot), 0) + 1
        for ledger in self._ledgers.values():
            for slot in range(self.slots):
                assert ledger.readers[slot] == flying.get((ledger.bucket, slot), 0), "readers and transfers disagree"
            strangers = set(ledger.arrived) - set(self.contributing.of(ledger.version))
            assert not strangers, f"bucket {ledger.bucket} counts {strangers}"
