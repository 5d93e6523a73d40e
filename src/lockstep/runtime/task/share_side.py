"""The side of a task that keeps a share of the buckets and applies what the workers lend it.

The store's work (reduce, update) runs on its own thread, in the order in which buckets become complete; the loop only
starts it and is notified when it is done.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lockstep.protocol.coordinator.recovery import LossPolicy
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.effects import (
    Apply,
    CopyBucket,
    GrantRegion,
    Measure,
    Prepare,
    SaveShard,
    SendMean,
    SendVersion,
    Serve,
    TakeBucket,
    WriteCheckpoint,
)
from lockstep.protocol.core.events import (
    Broken,
    BucketApplied,
    BucketMeasured,
    BucketTaken,
    GradientArrived,
    MeanArrived,
    MeanMade,
    Prepared,
    Served,
    TensorKind,
)
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import (
    Answer,
    BucketCopy,
    GradientNote,
    Grant,
    Layout,
    MeanNote,
    ParameterEntry,
    Ticket,
    VersionNote,
)
from lockstep.protocol.core.plan import Plan, first_difference, make_plan
from lockstep.protocol.server.async_server_machine import AsyncServerMachine
from lockstep.protocol.server.homed_machine import HomedServerMachine
from lockstep.protocol.server.rank_share import RankShareMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.runtime import phrases
from lockstep.runtime.checkpoint.folder import CheckpointFolder, verify
from lockstep.runtime.task.connection import Connection
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.shard_saving import ShardSaving
from lockstep.runtime.task.side import CarriesOut, Side, Takes
from lockstep.runtime.task.store import HandsOnMeans, ShardStore, StoreTimes
from lockstep.runtime.task.store_queue import StoreQueue
from lockstep.transports.base import Loan, Region, loan_ticket
from lockstep.transports.control.codec import fits_in_note
from lockstep.transports.memory import resident_bytes

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node
    from lockstep.runtime.task.node_config import NodeConfig

_JOIN_SECONDS = 10.0
COPY_BYTES = 4 << 20
"""Of a bucket that is copied, in one message."""
MakeStore = Callable[[], ShardStore]
_Life = tuple[TaskId, Incarnation]


class _StoreStatus:
    """What the store's thread is doing; written by it, read by any thread that takes a snapshot."""

    def __init__(self, queued: Callable[[], int]) -> None:
        self.doing = ""
        self.since = 0.0
        self.ident = 0
        self.queued = queued

    def enter(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()

    def leave(self) -> None:
        self.since = 0.0


def _without_groups(parameters: Iterable[ParameterEntry]) -> list[ParameterEntry]:
    return [dataclasses.replace(entry, group=0) for entry in parameters]


def _make_machine(task: TaskId, config: NodeConfig, journal: Journal) -> ServerMachine:
    shape = config.cluster.shape
    if not config.synchronous:
        return AsyncServerMachine(task, shape, journal, eager=config.eager)
    if config.recovery.of(shape).ranks_return:
        return RankShareMachine(task, shape, journal)
    if config.recovery.server_replicas:
        shrinks = config.recovery.on_worker_loss is LossPolicy.SHRINK
        return HomedServerMachine(task, shape, journal, eager=config.eager, summed=config.summed, any_rates=shrinks)
    return ServerMachine(
        task,
        shape,
        journal,
        eager=config.eager,
        summed=config.summed,
        aggregate=config.aggregate,
        any_rates=config.recovery.on_worker_loss is LossPolicy.SHRINK,
        averages=not shape.servers,
        overwrites=config.overwrites_versions,
    )


class ShareSide(Side):
    """What a server does: gradients in, the next version out."""

    machine: ServerMachine

    def __init__(self, node: Node, make_store: MakeStore) -> None:
        """``make_store`` is called on the store's thread once there is something to store: it may import torch."""
        self.machine = _make_machine(node.task, node.config, node.journal)
        self._node, self._links = node, node.links
        self._config = node.config
        self._make_store = make_store
        self._store: ShardStore | None = None
        self._second_homes: HandsOnMeans | None = None
        """The same, if its buckets have second homes."""
        self._plan: Plan | None = None
        self._slots: dict[int, tuple[Region, ...]] = {}
        """By shard of the plan: its own; with second homes, any."""
        self._means: Region | None = None
        """Where the means that are handed on lie, as in a worker's arena."""
        self._inboxes: dict[_Life, Region] = {}
        self._layout: Layout | None = None
        self.saving: ShardSaving = ShardSaving(node)
        self._handed = 0
        self._used = 0
        self._counting = threading.Lock()
        """Updates that the store's thread has received, and those that it has finished."""
        self._work = StoreQueue()
        self._thread = threading.Thread(target=self._run_store, name=f"store {node.task.short}", daemon=True)
        self.status = _StoreStatus(self._work.qsize)

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def has_replica(self) -> bool | None:
        """With second homes, whether every one of them holds everything, as this server's view says."""
        return self.machine.places.placement.whole if isinstance(self.machine, HomedServerMachine) else None

    @property
    def native_id(self) -> int:
        """Of the store's thread, as the kernel knows it."""
        return self._thread.native_id or 0

    @property
    def times(self) -> StoreTimes:
        """Where the time of the store's thread has gone."""
        return StoreTimes() if self._store is None else self._store.times

    def memory(self) -> dict[str, int]:
        """Bytes that it holds for its share, by purpose."""
        held = {
            "versions": sum(resident_bytes(slot.buffer) for slots in self._slots.values() for slot in slots),
            "arriving gradients": sum(resident_bytes(inbox.buffer) for inbox in self._inboxes.values()),
        }
        return held | dict({} if self._store is None else self._store.memory())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._store is not None:
            self._store.close()
        self.saving.close()

    # -- the loop's thread --

    def effects(self) -> CarriesOut:
        return {
            Apply: self._apply,
            Measure: self._measure,
            SendVersion: self._send_version,
            SendMean: self._send_mean,
            CopyBucket: self._copy_bucket,
            TakeBucket: self._take_bucket,
            GrantRegion: self._grant,
            Serve: self._serve,
            SaveShard: self._save_shard,
            WriteCheckpoint: self._write_checkpoint,
            Prepare: self._begin_to_prepare,
        }

    def takes(self) -> Takes:
        return {GradientNote: self._gradient_lent, MeanNote: self._mean_lent}

    def _serve(self, effect: Serve) -> None:
        self._work.put(lambda: self._answer(effect))

    def _save_shard(self, effect: SaveShard) -> None:
        self._node.on_save(effect.version)
        self._work.put(lambda: self._save(effect))

    def _begin_to_prepare(self, effect: Prepare) -> None:
        self._node.reporter.phase_unless_importing(TaskPhase.RECEIVING_PARAMETERS)
        self._work.put(lambda: self._prepare(effect.layout))

    def _apply(self, effect: Apply) -> None:
        loans = [self._node.loans.take(arrival) for arrival in effect.arrivals]
        self._handed += 1
        self._work.put_update(effect.bucket, lambda: self._apply_now(effect, loans), later=effect.in_background)

    def _measure(self, effect: Measure) -> None:
        loans = self._node.loans.read(effect.arrivals)
        self._work.put(lambda: self._measure_now(effect, loans))

    def _send_version(self, effect: SendVersion) -> None:
        assert self._plan is not None
        bucket = self._plan.buckets[effect.bucket]
        source = self._slots[bucket.server][effect.slot]
        note = VersionNote(effect.version, effect.bucket)
        if effect.peer == self._node.task:
            lent = source.buffer[bucket.shard_offset : bucket.shard_offset + bucket.nbytes]
            self._links.lend_to_itself(note, effect.version, TensorKind.VERSION, lent)
            return
        connection = self._node.peers[effect.peer].connection
        if connection is None:
            return
        send = connection.lend_version if effect.in_place else connection.write_version
        send(note, source, bucket.shard_offset, bucket.nbytes, effect.ticket, bucket.arena_offset)

    def _send_mean(self, effect: SendMean) -> None:
        assert self._plan is not None
        assert self._means is not None
        connection = self._node.peers[effect.peer].connection
        if connection is None:
            return
        bucket, update, fits = self._plan.buckets[effect.bucket], effect.update, fits_in_note(effect.update)
        if not fits:
            connection.send(update)
        note = MeanNote(effect.step, effect.bucket, update if fits else None)
        at = bucket.arena_offset
        connection.lend_mean(note, self._means, at, bucket.nbytes, effect.ticket, at)

    def _copy_bucket(self, effect: CopyBucket) -> None:
        connection = self._node.peers[effect.peer].connection
        if connection is not None:
            self._work.put(lambda: self._copy_to(effect, connection))

    def _take_bucket(self, effect: TakeBucket) -> None:
        self._work.put(lambda: self._take_copy(effect))

    def _grant(self, effect: GrantRegion) -> None:
        peer = effect.peer
        if peer == self._node.task:
            self._links.say_to_itself(Grant(self._links.own_ticket()))
            return
        connection = self._node.peers[peer].connection
        if connection is None or connection.address is None or self._plan is None:
            return
        assert self._store is not None, "the plan is known once the store is prepared"
        self._work.put(self._store.links_changed)
        life = (peer, connection.incarnation)
        # With second homes any bucket may come here, and each has its place.
        room = self._plan.arena_bytes if self._replicates else self._plan.shard_room(self._node.task.index)
        nbytes = max(room, 1)
        if connection.lends_in_place:
            # Gradients are reduced in the worker's own memory; memory for them here would stay unused.
            connection.send(Grant(loan_ticket(self._node.transport.name, nbytes)))
            return
        self._free_inboxes_of_former_lives(peer, life)
        if life not in self._inboxes:
            self._inboxes[life] = self._node.transport.allocate(nbytes, f"gradients of {peer}")
        ticket: Ticket = self._node.transport.grant(self._inboxes[life], connection.address)
        connection.send(Grant(ticket))

    def _free_inboxes_of_former_lives(self, peer: TaskId, life: _Life) -> None:
        """What a lost worker delivered completely still counts; its memory is freed once that has been used."""
        used = {id(loan.buffer.obj) for loan in self._node.loans.held()}
        for known in [one for one in self._inboxes if one[0] == peer and one != life]:
            if id(self._inboxes[known].buffer.obj) not in used and self._handed == self._used:
                self._inboxes.pop(known).close()

    # -- a transport's thread --

    def _gradient_lent(self, peer: TaskId, incarnation: Incarnation, note: GradientNote, loan: Loan) -> None:
        self._node.loop.do(lambda: self._take(peer, incarnation, note, loan))

    def _take(self, peer: TaskId, incarnation: Incarnation, note: GradientNote, loan: Loan) -> None:
        arrival = self._node.loans.keep(loan)
        self._node.loop.handle(GradientArrived(peer, incarnation, note.step, note.bucket, note.edition, arrival))

    def _mean_lent(self, peer: TaskId, incarnation: Incarnation, note: MeanNote, loan: Loan) -> None:
        self._node.loop.do(lambda: self._take_mean(peer, incarnation, note, loan))

    def _take_mean(self, peer: TaskId, incarnation: Incarnation, note: MeanNote, loan: Loan) -> None:
        arrival = self._node.loans.keep(loan)
        self._node.loop.handle(MeanArrived(peer, incarnation, note.step, note.bucket, arrival, note.update))

    # -- the store's thread --

    def _run_store(self) -> None:
        self.status.ident = threading.get_ident()
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and ends the job
                self._tell_broken(error)
            self.status.leave()

    def _tell_broken(self, error: Exception) -> None:
        reason = failure_of(error, phrases.cannot_serve(error))
        self._node.loop.post(Broken(self._node.task, self.machine.step, reason))

    def _prepare(self, layout: Layout) -> None:
        self.status.enter("preparing its memory")
        plan = make_plan(layout.parameters, len(self._config.cluster.shape.homes), layout.bucket_bytes)
        self._store = self._make_store()
        if self._replicates:
            assert isinstance(self._store, HandsOnMeans), "a store of servers with second homes"
            self._second_homes = self._store
        slots = {shard: self._make_slots(layout, plan, shard) for shard in self._shards(plan)}
        if self._replicates:
            self._means = self._node.transport.allocate(max(plan.arena_bytes, 1), "means")
        is_saver = self._node.task in self._config.cluster.shape.savers
        if layout.start > INITIAL_STEP and layout.checkpoint and is_saver:
            self._restore(layout)
        self._plan, self._slots, self._layout = plan, slots, layout
        self._node.reporter.phase(TaskPhase.TRAINING)
        self._node.loop.post(Prepared(plan))

    @property
    def _replicates(self) -> bool:
        return bool(self._config.recovery.server_replicas)

    def _shards(self, plan: Plan) -> Iterable[int]:
        """The shards that this task may hold. Memory of those that it does not hold is never touched."""
        return range(plan.servers) if self._replicates else (self._node.task.index,)

    def _make_slots(self, layout: Layout, plan: Plan, shard: int) -> tuple[Region, ...]:
        assert self._store is not None
        nbytes = max(plan.shard_room(shard) + self._store.spare_bytes(plan), 1)
        slots = tuple(self._node.transport.allocate(nbytes, "parameters") for _ in range(self.machine.slots))
        self._store.prepare(layout, plan, shard, [slot.buffer for slot in slots])
        return slots

    def _restore(self, layout: Layout) -> None:
        """Read parameters and optimizers from a checkpoint. Any problem with it ends the job, with a sentence."""
        assert self._store is not None
        self.status.enter(f"reading the checkpoint {layout.checkpoint}")
        path = CheckpointFolder(self._config.train_dir).named(layout.checkpoint)
        manifest = verify(path)
        # Groups may differ (--compile makes more of them): they only determine what shares a bucket and an optimizer.
        difference = first_difference(_without_groups(manifest.parameters), _without_groups(layout.parameters))
        if difference is not None:
            raise ValueError(f"the checkpoint {path} is from another model: {difference}; give another --train_dir")
        self._store.restore(path, [shard.name for shard in manifest.shards], layout.start % self.machine.slots)

    def _save(self, effect: SaveShard) -> None:
        """Copy the shard now, before the next update; it is written to disk later."""
        assert self._store is not None
        store, buckets = self._store, frozenset(effect.buckets)
        self.status.enter(f"copying version {effect.version} for a checkpoint")
        self.saving.save(effect.version, lambda version: store.snapshot(version, buckets))

    def _write_checkpoint(self, effect: WriteCheckpoint) -> None:
        assert self._layout is not None
        self.saving.write_checkpoint(effect, self._layout)

    def _apply_now(self, effect: Apply, loans: list[Loan]) -> None:
        assert self._store is not None
        self.status.enter(f"the update of step {effect.step}, bucket {effect.bucket}")
        if self._node.faults is not None:
            self._node.faults.in_store(effect.step)
        gradients = [loan.buffer for loan in loans]

        def done(error: Exception | None) -> None:
            self._applied(effect, loans, error)

        if effect.hands_on:
            made = MeanMade(effect.bucket, effect.step)
            mean = self._place_of_mean(effect.bucket)
            self._handing_store.begin_and_keep(effect, gradients, mean, lambda: self._node.loop.do(made), done)
        else:
            self._store.begin(effect, gradients, done)

    @property
    def _handing_store(self) -> HandsOnMeans:
        assert self._second_homes is not None, "asked for by machines with second homes only"
        return self._second_homes

    def _digest(self, effect: Apply) -> str:
        """Of what was made, in the steps in which both homes compare it."""
        if not effect.digests:
            return ""
        return self._handing_store.digest(effect.bucket, effect.step + 1)

    def _place_of_mean(self, bucket: BucketId) -> memoryview:
        """Both homes make the next version of the same bytes: those of the mean, clipped."""
        assert self._plan is not None
        assert self._means is not None
        known = self._plan.buckets[bucket]
        return self._means.buffer[known.arena_offset : known.arena_offset + known.nbytes]

    def _applied(self, effect: Apply, loans: list[Loan], error: Exception | None) -> None:
        """Called on the store's thread, or on one that the store started."""
        if error is None:
            # Before the gradients are given back: every worker waits for the version, none yet for its memory.
            self._node.loop.do(BucketApplied(effect.bucket, effect.step, self._digest(effect)))
        else:
            self._tell_broken(error)
        for loan in loans:
            loan.release()
        with self._counting:  # two buckets may be done at the same moment
            self._used += 1

    def _copy_to(self, effect: CopyBucket, connection: Connection) -> None:
        """To a second home that is new, in messages: it happens once, and beside the steps."""
        self.status.enter(f"copying bucket {effect.bucket} for {effect.peer.short}")
        data = self._handing_store.copy_out(effect.bucket, effect.version)
        for offset in range(0, len(data), COPY_BYTES):
            part = data[offset : offset + COPY_BYTES]
            connection.send(BucketCopy(effect.bucket, effect.version, offset, len(data), part, effect.edition))

    def _take_copy(self, effect: TakeBucket) -> None:
        self.status.enter(f"taking a copy of bucket {effect.bucket}")
        self._handing_store.take_in(effect.bucket, effect.version, effect.data)
        self._node.loop.do(BucketTaken(effect.bucket, effect.version))

    def _measure_now(self, effect: Measure, loans: list[Loan]) -> None:
        assert self._store is not None
        self.status.enter(f"the norm of step {effect.step}, bucket {effect.bucket}")
        self._store.measure(effect, [loan.buffer for loan in loans], lambda *found: self._norm_found(effect, *found))

    def _norm_found(self, effect: Measure, norm: float, error: Exception | None) -> None:
        """Called on the store's thread, or on one that the store started."""
        if error is None:
            self._node.loop.do(lambda: self._measured(effect, norm))
        else:
            self._tell_broken(error)

    def _measured(self, effect: Measure, norm: float) -> None:
        """The loop's thread."""
        self._node.loans.read_through(effect.arrivals)
        self._node.loop.handle(BucketMeasured(effect.bucket, effect.attempt, norm))

    def _answer(self, effect: Serve) -> None:
        question = effect.question
        try:
            if self._store is None:
                raise ValueError(f"{self._node.task} has no parameters yet")
            answer = Answer(question.number, self._store.answer(question.what, question.data), "")
        except ValueError as error:
            answer = Answer(question.number, b"", str(error))
        if effect.tells:
            self._node.loop.post(Served(effect.peer, question, answer))
        else:
            self._node.peers[effect.peer].send(answer)

    def free(self) -> None:
        for region in self._inboxes.values():
            region.close()
        for slots in self._slots.values():
            for region in slots:
                region.close()
        if self._means is not None:
            self._means.close()
