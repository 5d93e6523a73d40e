"""The side of a task that trains: its training thread meets the loop here.

The training thread reports what it did (``begin_step``, ``produced``, ``seal``, ``finish``; only ``finish`` waits) and
waits for versions (``wait_version``). Everything else happens on the loop's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.effects import Answered, NormKnown, SendGradient, SendPull, VersionReady, WordGiven
from lockstep.protocol.core.events import (
    Asked,
    Finished,
    Prepared,
    Produced,
    Sealed,
    StateTaken,
    StepBegun,
    TensorKind,
    VersionArrived,
)
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.messages import (
    Answer,
    Clip,
    GradientNote,
    GroupRates,
    Layout,
    LoopCount,
    Pull,
    Question,
    Ticket,
    VersionNote,
)
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.worker.rank_machine import RankMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine
from lockstep.runtime.task.connection import Connection
from lockstep.runtime.task.side import CarriesOut, Side, Takes
from lockstep.transports.base import Loan, Region
from lockstep.transports.memory import resident_bytes

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node

MOST_IN_PLACE = 400
"""Buckets of one server that are read where the server has them. Each is lent until its next version is here, so there
are two loans of each, and a link has room for about a thousand: with more buckets nothing would move."""

_STEPS_KEPT = 4096

OnVersion = Callable[[BucketId, int, Loan | None], None]
"""A bucket is at this version: in the arena, or in a loan that the called function gives back later."""

InOrder = Callable[[Callable[[], None]], None]
"""Runs something after everything that it was given before."""


def _at_once(action: Callable[[], None]) -> None:
    action()


class TrainingSide(Side):
    """What a worker does: gradients out, parameters in."""

    machine: WorkerMachine

    def __init__(self, node: Node) -> None:
        config, rules = node.config, node.rules
        self.machine: WorkerMachine = (
            RankMachine(node.task, config.cluster.shape, node.journal)
            if rules.ranks_return
            else WorkerMachine(
                node.task,
                config.cluster.shape,
                node.journal,
                eager=config.eager,
                may_lag=config.aggregate is not None,
                tells_state=rules.keeps_states,
            )
        )
        self.main = node.main
        self.gradients: Region | None = None
        self.parameters: Region | None = None
        self._other_half: Region | None = None
        """Where ranks come back: where every second version arrives, so that the one before stays as it came."""
        self.lands_in_gradients = False
        """A version replaces the gradients that it is made of, where a link lets it land once (ranks)."""
        self._once: dict[TaskId, tuple[Connection, int, Ticket]] = {}
        """The newest ticket of each home for that, and of which link and version it is."""
        self._word: Step = INITIAL_STEP - 1
        self.reads_in_place = False
        self._node, self._links = node, node.links
        self._config = config
        self._plan: Plan | None = None
        self._versions: list[int] = []
        self._narrow: dict[BucketId, int] = {}
        """Bytes of a gradient bucket, if it is sent in fewer than the plan gives it."""
        self._awaited: tuple[int, Sequence[BucketId] | None] | None = None
        """The version that the training thread waits for: of these buckets, or of all."""
        self._stood_still = 0.0
        self._blocked: deque[tuple[Step, float]] = deque(maxlen=_STEPS_KEPT)
        self._changed = threading.Condition()
        self._on_version: OnVersion | None = None
        # An answer that is late must not be taken for one to a question of the next incarnation.
        self._questions = (node.incarnation % (1 << 32)) << 20
        self._answers: dict[int, Answer] = {}
        self._norms_known = 0
        self._norm = 0.0
        """How many questions for a norm were answered, and the last answer. Never more than one is open."""

    @property
    def plan(self) -> Plan | None:
        return self._plan

    # -- called by the training thread --

    def allocate(self, plan: Plan, *, in_place: bool = False, spare: int = 0) -> tuple[Region, Region]:
        """Registered memory for the gradients, with ``spare`` bytes after them, and the parameters of this plan.

        ``in_place``: parameters may also be read where the server has them, over links that can do that. A worker
        that the others may leave behind must not: they would wait until it returns what they want to overwrite.
        """
        self._take_plan(plan, in_place=in_place)
        self.gradients = self._node.transport.allocate(max(plan.arena_bytes + spare, 1), "gradients")
        self.parameters = self._node.transport.allocate(max(plan.arena_bytes, 1), "parameters")
        if self._node.rules.ranks_return:
            self._other_half = self._node.transport.allocate(max(plan.arena_bytes, 1), "parameters")
        return self.gradients, self.parameters

    def landing(self, version: int) -> Region:
        """Where this version arrives."""
        assert self.parameters is not None
        return self.parameters if self._other_half is None or version % 2 == 0 else self._other_half

    def use(self, plan: Plan, gradients: Region, parameters: Region) -> None:
        """As ``allocate``, with regions that the caller has registered with this node's transport."""
        self._take_plan(plan, in_place=False)
        self.gradients, self.parameters = gradients, parameters

    def _take_plan(self, plan: Plan, *, in_place: bool) -> None:
        self._plan = plan
        self.reads_in_place = in_place and self._config.synchronous and self._config.aggregate is None
        if max((len(plan.buckets_of(server)) for server in range(plan.servers)), default=0) > MOST_IN_PLACE:
            self.reads_in_place = False
        self._versions = [INITIAL_STEP] * len(plan.buckets)

    def memory(self) -> dict[str, int]:
        """Bytes that this worker holds for the exchange, by purpose."""
        regions = {"gradients": self.gradients, "parameters": self.parameters, "means": self._other_half}
        return {name: resident_bytes(region.buffer) for name, region in regions.items() if region is not None}

    def announce(self, layout: Layout, on_version: OnVersion | None = None) -> None:
        """The model is known. ``on_version`` is called on the loop's thread for each bucket; it must not block."""
        assert self._plan is not None, "allocate first"
        self._on_version = on_version
        self._node.reporter.phase(TaskPhase.RECEIVING_PARAMETERS)
        self._node.loop.post(Prepared(self._plan, layout))

    def offer_initial(self) -> None:
        """Chief only: the gradient arena now holds the initial parameters."""
        assert self._plan is not None
        for bucket in self._plan.buckets:
            self._node.loop.post(Produced(INITIAL_STEP, bucket.id))

    def begin_step(self, step: Step, rates: tuple[GroupRates, ...] = (), *, in_order: InOrder = _at_once) -> None:
        """Forward is about to begin. ``in_order``: notifies the loop, if the previous seal may not have reached it."""
        in_order(lambda: self.tell_begun(step, rates))
        self.enter_step(step)

    def tell_begun(self, step: Step, rates: tuple[GroupRates, ...]) -> None:
        """The whole version of this step is here, and its forward has begun."""
        self._blocked.append((step, self._stood_still))
        self._stood_still = 0.0
        self._node.loop.post(StepBegun(step, rates))

    def enter_step(self, step: Step) -> None:
        """The training thread is in this step; ``tell_begun`` may follow, once all parameters are here."""
        self.main.enter(Doing.COMPUTING, f"step {step}")
        if self._node.faults is not None:
            self._node.faults.at_step(self, step)

    def produced(self, step: Step, bucket: BucketId, nbytes: int | None = None) -> None:
        """The gradient bucket is filled in the arena; ``nbytes``: only this many bytes of it are sent."""
        if nbytes is not None:
            self._narrow[bucket] = nbytes
        self._node.loop.do(Produced(step, bucket))

    def seal(
        self,
        step: Step,
        absent: tuple[BucketId, ...] = (),
        rates: tuple[GroupRates, ...] = (),
        *,
        without: tuple[int, ...] = (),
        void: bool = False,
        values: bool = False,
        occasion: str = "",
        state: bytes | None = b"",
        clip: tuple[Clip, ...] = (),
        asks: bool = False,
        loops: tuple[LoopCount, ...] = (),
    ) -> None:
        """The gradients are final. What the rest means: ``protocol.messages.Seal``; ``state``: for the coordinator,
        None if ``tell_state`` follows. ``asks``: ``wait_norm`` follows, before the next question."""
        self._node.loop.post(Sealed(step, absent, rates, without, void, values, occasion, state, clip, asks, loops))

    def wait_norm(self, step: Step, question: int) -> float:
        """Block until the question for a norm of this number, from 1, is answered; JobEndedError if the job ends."""
        if self._norms_known < question:
            self.main.enter(Doing.WAITING, f"the norm of step {step}")
            with self._changed:
                while self._norms_known < question:
                    self._node.raise_if_ended()
                    self._changed.wait(1.0)
            self.main.enter(Doing.COMPUTING, f"step {step}")
        return self._norm

    def tell_state(self, step: Step, data: bytes, stuck: str = "") -> None:
        """What the next incarnation of this worker would need to begin with ``step``, or why it could not."""
        self._node.loop.post(StateTaken(step, data, stuck))

    def wait_version(self, version: int) -> int:
        """Block until every bucket is at ``version``; JobEndedError if the job ends first.

        Returns the version that is here: with backup workers it may be a later one, the same for all buckets.
        """
        self.main.enter(Doing.WAITING, f"version {version}")
        self._wait(version, None)
        self.main.enter(Doing.USER_CODE)
        return self._versions[0] if self._versions else version

    def wait_buckets(self, version: int, buckets: Sequence[BucketId]) -> None:
        """Block until these buckets are at ``version``, in the middle of its step's forward."""
        if self.has_version(version, buckets):
            return
        self.main.enter(Doing.WAITING, f"version {version}")
        self._wait(version, buckets)
        self.main.enter(Doing.COMPUTING, f"step {version}")

    def has_version(self, version: int, buckets: Sequence[BucketId] | None = None) -> bool:
        """Whether these buckets are at ``version``; all of them, if none are named."""
        if buckets is None:
            return self._is_whole(version)
        return all(self._versions[bucket] >= version for bucket in buckets)

    def _wait(self, version: int, buckets: Sequence[BucketId] | None) -> None:
        began = time.monotonic()
        with self._changed:
            self._awaited = (version, buckets)
            while not self.has_version(version, buckets):
                self._node.raise_if_ended()
                self._changed.wait(1.0)
            self._awaited = None
        self._stood_still += time.monotonic() - began

    def wait_word(self, step: Step) -> None:
        """Where ranks come back: block until every rank has every mean of ``step``; JobEndedError if the job ends."""
        if self._word >= step:
            return
        self.main.enter(Doing.WAITING, f"the word of step {step}")
        began = time.monotonic()
        with self._changed:
            while self._word < step:
                self._node.raise_if_ended()
                self._changed.wait(1.0)
        self._stood_still += time.monotonic() - began
        self.main.enter(Doing.USER_CODE)

    def ask_within(self, peer: TaskId, what: str, data: bytes, until: Callable[[], bool]) -> bytes | None:
        """As ``ask``; None once ``until`` says that it is in vain."""
        self._questions += 1
        number = self._questions
        self._node.loop.post(Asked(Question(number, what, data), peer))
        with self._changed:
            while number not in self._answers:
                self._node.raise_if_ended()
                if until():
                    return None
                self._changed.wait(0.2)
            answer = self._answers.pop(number)
        if answer.problem:
            raise ValueError(answer.problem)
        return answer.data

    def blocked(self) -> dict[Step, float]:
        """How long the training thread waited for the parameters of each of the last steps, in seconds."""
        return dict(self._blocked)

    def home_of(self, bucket: BucketId) -> TaskId:
        """The task that makes the versions of this bucket now; with second homes it may change."""
        return self.machine.home_of(bucket)

    def ask(self, what: str, data: bytes, bucket: BucketId, *, changes: bool = False) -> bytes:
        """Ask the home of a bucket something outside the steps and block until it answers. ``changes``: it then has
        another state of the bucket, and so has its second home if there is one.

        ValueError carries the server's message if it cannot answer; JobEndedError if the job ends first.
        """
        self._questions += 1
        number = self._questions
        self._node.loop.post(Asked(Question(number, what, data, bucket, changes)))
        with self._changed:
            while number not in self._answers:
                self._node.raise_if_ended()
                self._changed.wait(1.0)
            answer = self._answers.pop(number)
        if answer.problem:
            raise ValueError(answer.problem)
        return answer.data

    def _is_whole(self, version: int) -> bool:
        """Whether all buckets are at the same version, this one or a later one."""
        versions = self._versions
        return not versions or (versions[0] >= version and versions.count(versions[0]) == len(versions))

    def finish(self, steps: Step) -> None:
        """This worker has done all its steps; wait until the whole job has ended, and raise if it ended badly."""
        self._node.reporter.phase(TaskPhase.FINISHING)
        self.main.enter(Doing.FINISHING)
        self._node.loop.post(Finished(steps))
        outcome = self._node.wait_until_ended()
        if not outcome.ok:
            self._node.raise_if_ended()

    # -- the loop's thread --

    def effects(self) -> CarriesOut:
        return {
            VersionReady: self._on_version_ready,
            SendGradient: self._send_gradient,
            SendPull: self._send_pull,
            Answered: self._on_answer,
            NormKnown: self._on_norm,
            WordGiven: self._on_word,
        }

    def takes(self) -> Takes:
        return {VersionNote: self._version_lent}

    def _on_answer(self, effect: Answered) -> None:
        with self._changed:
            self._answers[effect.answer.number] = effect.answer
            self._changed.notify_all()

    def _on_norm(self, effect: NormKnown) -> None:
        with self._changed:
            self._norm = effect.norm
            self._norms_known += 1
            self._changed.notify_all()

    def _on_word(self, effect: WordGiven) -> None:
        with self._changed:
            self._word = effect.step
            self._changed.notify_all()

    def _on_version_ready(self, effect: VersionReady) -> None:
        bucket, version = effect.bucket, effect.version
        loan = self._node.loans.take(effect.arrival) if effect.arrival else None
        if self._on_version is not None:
            self._on_version(bucket, version, loan)
        elif loan is not None:
            loan.release()
        with self._changed:
            self._versions[bucket] = version
            # Woken for every bucket, the training thread would check all of them each time.
            if self._awaited is not None and self.has_version(*self._awaited):
                self._changed.notify_all()

    def _send_gradient(self, effect: SendGradient) -> None:
        assert self._plan is not None
        assert self.gradients is not None
        bucket = self._plan.buckets[effect.bucket]
        note = GradientNote(effect.step, effect.bucket, effect.edition)
        nbytes = self._narrow.get(bucket.id, bucket.nbytes)
        if effect.peer == self._node.task:
            lent = self.gradients.buffer[bucket.arena_offset : bucket.arena_offset + nbytes]
            self._links.lend_to_itself(note, effect.step, TensorKind.GRADIENT, lent)
            return
        connection = self._node.peers[effect.peer].connection
        if connection is not None:
            # With second homes a server may get any bucket, and each has its place there.
            at = bucket.arena_offset if self._config.recovery.server_replicas else bucket.shard_offset
            connection.lend_gradient(note, self.gradients, bucket.arena_offset, nbytes, effect.ticket, at)

    def _send_pull(self, effect: SendPull) -> None:
        if effect.peer == self._node.task:
            self._links.say_to_itself(
                Pull(effect.version, effect.have, self._links.own_ticket(), in_place=True, view=effect.view)
            )
            return
        connection = self._node.peers[effect.peer].connection
        if connection is None or connection.address is None or self.parameters is None:
            return
        ticket = self._ticket_once(effect, connection)
        if ticket is None:
            ticket = self._node.transport.grant(self.landing(effect.version), connection.address)
        in_place = self.reads_in_place and connection.lends_in_place
        connection.send(Pull(effect.version, effect.have, ticket, in_place, effect.view))

    def _ticket_once(self, effect: SendPull, connection: Connection) -> Ticket | None:
        """Where means land in place of the gradients that they are made of: by a ticket for this version alone, by
        which each lands once. One that is sent again must not land on what the program has made of it since."""
        if not self.lands_in_gradients or effect.version <= max(self._node.start_step, 0):
            return None  # the first version comes unasked for, while the program may still fill the arena
        known = self._once.get(effect.peer)
        if known is None or known[:2] != (connection, effect.version):
            assert self.gradients is not None
            ticket = connection.grant_once(self.gradients)
            if ticket is None:
                self._once.pop(effect.peer, None)
                return None
            known = self._once[effect.peer] = (connection, effect.version, ticket)
        return known[2]

    def landed_in_gradients(self, bucket: BucketId, version: int) -> bool:
        """Whether this version of a bucket, which has just come, is where its gradient was. On the loop's thread."""
        known = self._once.get(self.home_of(bucket))
        return known is not None and known[1] == version

    def _version_lent(self, peer: TaskId, _incarnation: Incarnation, note: VersionNote, loan: Loan) -> None:
        self._node.loop.do(lambda: self._take_version(peer, note, loan))

    def _take_version(self, peer: TaskId, note: VersionNote, loan: Loan) -> None:
        arrival = self._node.loans.keep(loan)
        self._node.loop.handle(VersionArrived(peer, note.version, note.bucket, arrival))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def free(self) -> None:
        for region in (self.gradients, self.parameters, self._other_half):
            if region is not None:
                region.close()
