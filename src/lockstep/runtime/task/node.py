"""One task: its machines, its loop, its links. Its sides (``side.py``) add what it does with tensors.

Nothing here is global, so any number of nodes can run in one process (most tests do that).
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.rank_coordinator import RankCoordinator
from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.core.activity import Doing, ShardWrite, TaskPhase
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import (
    BecameMember,
    CallAnswered,
    Effect,
    GiveBack,
    JobEnded,
    Noticed,
    PeerLeaves,
    Send,
    StillMissing,
    ViewChanged,
)
from lockstep.protocol.core.events import Broken, Event, PeerGone, Received, TensorKind, TransferEnded
from lockstep.protocol.core.faults import Fault
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, JobId, Role, Step, TaskId, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import (
    Envelope,
    Hello,
    Join,
    Message,
    MissingTask,
    Note,
    Refused,
    Setting,
    Ticket,
    TransportAddress,
)
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.timing import (
    FORCE_SECONDS,
    LEAVE_SECONDS,
    PROGRAM_FORCE_SECONDS,
    QUIET_SECONDS,
    SAY_SECONDS,
    SETTLE_SECONDS,
)
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.task import TaskMachine
from lockstep.runtime import phrases
from lockstep.runtime.checkpoint.ending import note_end
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.start_facts import StartFacts, start_facts
from lockstep.runtime.task.call_desk import CallDesk
from lockstep.runtime.task.discovery import Discovery, Search
from lockstep.runtime.task.end_guard import EndGuard, GiveUp
from lockstep.runtime.task.introspection import Observed
from lockstep.runtime.task.job_before import JobBefore
from lockstep.runtime.task.loans import Loans
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.outcome import JobEndedError, Outcome, outcome_of
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.task.side import Side
from lockstep.runtime.trace.traffic import Traffic
from lockstep.runtime.watch.metrics import metrics_json
from lockstep.runtime.watch.snapshot import StoreStatus
from lockstep.runtime.watch.status import MainThread
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.security.chosen import chosen_key
from lockstep.transports.base import Loan, Transport, loan_ticket
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.control.link import ControlLink, LinkEvents, serve_links
from lockstep.transports.control.monitor_service import snapshot_handler, witness_handler
from lockstep.transports.control.server import ControlServer
from lockstep.transports.loan import HeldLoan
from lockstep.transports.registry import make_transport, stays_on_one_host
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.runtime.task.share_side import ShareSide

Say = Callable[[str], None]
LEFT_LOOK_SECONDS = 0.2
LOOKS_FOR_NOBODY = 3
"""After this many checks that find nothing at the coordinator's address, the job is over."""
MOST_SAID = 5
"""This many missing tasks get a line each; the others are only named."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a node is configured with, once."""

    cluster: ClusterSpec
    settings: tuple[Setting, ...]
    synchronous: bool = True
    eager: bool = True
    """Apply a bucket as soon as all its gradients are there. Only if nothing edits gradients after backward."""
    summed: bool = False
    """Gradients are added up and applied once, instead of averaged."""
    aggregate: int | None = None
    """How many workers' gradients make a step, if not all do (backup workers; not with ``eager``)."""

    tell_paths: bool = False
    """Print which path each link takes, and at the end what went over it."""
    watch: WatchSettings = field(default_factory=WatchSettings)
    run_folder: str = ""
    """Where reports and journals go; empty: a folder of the job under the temporary directory."""
    faults: tuple[Fault, ...] = ()
    """What a drill plants in this task."""
    version: str = __version__
    recovery: RecoveryRules = field(default_factory=RecoveryRules)
    beginning: Beginning = field(default_factory=Beginning)
    """What the job begins with; only the coordinator's counts."""
    train_dir: str = ""
    """Where checkpoints are; empty: nowhere."""
    checkpoints_kept: int = 5
    returning: bool = False
    """A later incarnation of this process: the others may still be in their earlier one."""
    finished: bool = False
    """An earlier incarnation of this task had finished its work: if no other task is left, the job is over."""
    later: bool = False
    """There was an earlier incarnation of this task, in a job that never forms again: if that has ended, this one does
    too."""
    former_job: JobId = 0
    """The job that an earlier incarnation of this server was in, if it may form again: it leaves its end in
    ``train_dir``."""
    give_up: GiveUp | None = None
    """Ends the process of a worker whose training thread does not notice that the job has failed."""
    own_program: bool = False
    """It is a program of the user's: it has longer, and what it announced as long is never cut off."""

    @property
    def task(self) -> TaskId:
        assert self.cluster.task is not None
        return self.cluster.task

    @property
    def overwrites_versions(self) -> bool:
        """Whether servers write each version over the one before: all workers have sealed their step with it by then,
        and nobody can come back to it."""
        common = self.synchronous and self.aggregate is None
        return bool(self.cluster.shape.servers) and not self.eager and common and not self.recovery.keeps_versions


class Node(Observed):
    """What all tasks have in common. Their constructors make the sides and put them together (``_compose``)."""

    machine: TaskMachine
    share: ShareSide | None = None
    """The side that keeps a share of the buckets, in a task that has one."""

    def __init__(self, config: NodeConfig, say: Say, reporter: TaskReporter) -> None:
        self.config = config
        self.task = config.task
        self.rules = config.recovery.of(config.cluster.shape)
        self.incarnation: Incarnation = secrets.randbits(63) + 1
        self.job: JobId = 0
        self.journal = Journal()
        self.main = MainThread()
        self.outcome: Outcome | None = None
        self.say = say
        self.reporter = reporter
        self._member = threading.Event()
        self._decided = threading.Event()
        """Set once it is decided whether this task becomes a member."""
        self._lives: dict[TaskId, Incarnation] = {}
        self._former: set[tuple[TaskId, Incarnation]] = set()
        self.start_step: Step = INITIAL_STEP
        """The step at which this task begins, once it is a member; ``INITIAL_STEP``: with the chief's parameters."""
        self.local_state = b""
        """The state that a worker had before that step; empty: as built."""
        self.checkpoint = ""
        """The checkpoint that the job began with."""
        self.late = self.replays = False
        """The job ran already when this task joined it; and a rank begins with the step before ``start_step``, which
        is committed, for all that follows from it on this rank alone."""
        self._ended = threading.Event()
        self._guard = EndGuard(lambda: phrases.does_not_return(self.task, self.main.doing), say, reporter)
        self._said_at: dict[str, float] = {}
        self._has_replica = True
        self._closed = False
        self.refused = False
        """The requested transport cannot be used here: bad input, not a failure of a task."""
        self.on_save: Callable[[int], None] = lambda _version: None
        """Called on the loop's thread: what is to be saved must stay as it is until it is copied."""
        self.while_calling: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around the time that the program waits in a call."""
        self.calls = CallDesk(self)
        self.traffic = Traffic()
        self.loans = Loans()
        self._server = self._listen()
        self.transport = self._make_transport()

    def _compose(self, *sides: Side) -> None:
        """Put the machines and the rest of the node together; the last thing that a constructor does."""
        config = self.config
        self._sides = sides
        self.effects = self._own_effects() | {kind: act for side in sides for kind, act in side.effects().items()}
        self._takes = {kind: take for side in sides for kind, take in side.takes().items()}
        self.machine = self._make_machine(sides, time.monotonic())
        self.loop = TaskLoop(self.machine, self._carry_out)
        self.peers = {peer: self._make_keeper(peer) for peer in self._linked_tasks()}
        self._discovery = Discovery(self) if self.machine.coordinator is not None else None
        dialed = [keeper for keeper in self.peers.values() if keeper.dials]
        tasks = len(config.cluster.shape.tasks())
        self._search = Search(dialed, self.start_facts, self._say_missing, lambda: self.leaving, tasks)
        self._begin_observing(self.say, config.watch, config.run_folder, config.faults)
        serve_links(self._server, self._on_hello, self._on_link)
        handlers = {"Snapshot": self._snapshot_json, "Metrics": lambda: metrics_json(self)}
        self._server.add_handlers("Task", {name: snapshot_handler(made) for name, made in handlers.items()})
        self._server.add_handlers("Task", {"Witness": witness_handler(self._statement_about)})

    # -- construction --

    def _listen(self) -> ControlServer:
        spec, own = self.cluster, parse_address(self.cluster.address_of(self.task)).host
        threads, host = 24 + 3 * len(spec.shape.tasks()), spec.listen_address().host
        return ControlServer(host, 0, threads=threads, advertised_host=own, ports=spec.second_ports)

    def _make_transport(self) -> Transport:
        name, rdma, private = self.cluster.protocol, self.cluster.rdma, self.cluster.require_private
        life = (str(self.task), self.incarnation)
        return make_transport(name, self._server, *life, chosen_key(), rdma, private=private)

    def _make_machine(self, sides: Sequence[Side], now: float) -> TaskMachine:
        spec, shape = self.cluster, self.cluster.shape
        join = Join(str(self.task), self.incarnation, socket.gethostname(), os.getpid(), self.config.settings)
        rules, deadline = self.rules, now + spec.startup_timeout
        first = server(1) if rules.server_replicas else worker(1) if rules.ranks_return else None
        member = MemberMachine(
            self.task, shape.coordinator, join, deadline, self.journal, now, returns=rules.returns, deputy=first
        )
        coordinator: CoordinatorMachine | None = None
        deputy: DeputyMachine | None = None
        if rules.server_replicas and self.task.role is Role.SERVER:
            deputy = DeputyMachine(self.task, shape, rules, self.journal)
        elif rules.ranks_return:
            deputy = DeputyMachine(self.task, shape, rules, self.journal, RankCoordinator)
        job = secrets.randbits(63) + 1
        if self.task == shape.coordinator and rules.server_replicas:
            beginning = self.config.beginning
            coordinator = HomedCoordinator(shape, job, self.journal, now, rules=rules, beginning=beginning)
        elif self.task == shape.coordinator and rules.ranks_return:
            beginning = self.config.beginning
            coordinator = RankCoordinator(shape, job, self.journal, now, rules=rules, beginning=beginning)
        elif self.task == shape.coordinator:
            coordinator = CoordinatorMachine(
                shape,
                job,
                self.journal,
                now,
                aggregate=self.config.aggregate,
                rules=rules,
                beginning=self.config.beginning,
            )
        roles = tuple(side.machine for side in sides)
        return TaskMachine(self.incarnation, member, roles, coordinator, self.journal, deputy)

    def _linked_tasks(self) -> Sequence[TaskId]:
        """Workers are linked with every task that holds buckets, servers with all workers and with the coordinator,
        and with each other if they have second homes."""
        shape = self.config.cluster.shape
        if self.task.role is Role.WORKER:
            return tuple(home for home in shape.homes if home != self.task)
        if self.task == shape.coordinator:
            return tuple(task for task in shape.tasks() if task != self.task)
        if self.rules.server_replicas:
            return tuple(task for task in shape.tasks() if task != self.task)
        return (shape.coordinator, *shape.worker_ids())

    def _make_keeper(self, peer: TaskId) -> PeerKeeper:
        shape = self.cluster.shape
        # Of two of the same kind, the one with the lower index listens; the coordinator has the lowest of its kind.
        dials = self.task.index > peer.index if self.task.role is peer.role else self.task.role is Role.WORKER
        return PeerKeeper(self, peer, self.cluster.address_of(peer), dials, len(shape.tasks()))

    # -- from start to close --

    def start(self) -> None:
        """Listen, report the address to the monitor, and look for the others."""
        for side in self._sides:
            side.start()
        self._server.start()
        self.reporter.ready(self._server.address, self.incarnation, self.job)
        self.reporter.phase(TaskPhase.CONNECTING)
        self.loop.start()
        for keeper in self.peers.values():
            keeper.returning = self.config.returning
            keeper.start()
        if self._discovery is not None:
            self._discovery.start()
        self._search.start()
        self.watchdog.start()

    def wait_until_member(self) -> None:
        """Block until the cluster is complete; JobEndedError if it never is. Prints which tasks are missing."""
        # Meanwhile the search, and the coordinator's roster, print which tasks are missing.
        others = self._job_before()
        while not self._decided.wait(LEFT_LOOK_SECONDS if self.config.finished or others is not None else None):
            if self.config.finished and self._others_have_left():
                self.say(phrases.had_finished(self.task))
                self.abandon(Outcome(True))
            elif others is not None and (end := others.look()) is not None:
                if end.ok:
                    self.say(phrases.came_back_too_late(self.task, ok=True))
                self.abandon(end)
        self.raise_if_ended()

    def _job_before(self) -> JobBefore | None:
        """Where to look for the end of the job that an earlier incarnation was in."""
        config = self.config
        if config.later:
            return JobBefore(self.cluster)
        if config.former_job and config.train_dir:
            return JobBefore(self.cluster, config.train_dir, config.former_job)
        return None

    def _others_have_left(self) -> bool:
        """Whether nothing listens where the coordinator was, or its monitor reports its end."""
        keeper = self.peers.get(self.coordinator)
        if keeper is None:
            return False
        found = keeper.finding.description
        gone = keeper.finding.answer is Reach.REFUSED and keeper.attempts >= LOOKS_FOR_NOBODY
        return gone or (found is not None and found.exited)

    def wait_until_ended(self) -> Outcome:
        """Block until the job is over on this task."""
        self._ended.wait()
        self._guard.noticed.set()
        assert self.outcome is not None
        return self.outcome

    @property
    def sees_others_off(self) -> bool:
        return self.task.role is Role.SERVER or self.task == self.coordinator

    @property
    def coordinator(self) -> TaskId:
        """The task that decides for the job; with second homes, it may be another one than at the start."""
        return self.machine.member.coordinator

    def see_others_off(self) -> None:
        """After the end: wait, bounded, until the others know of it and have closed their links. For the coordinator,
        which sends the message of the end: on a busy machine it may still be in flight when this task is done."""
        self.winding_up = True
        self._note_end()
        deadline = time.monotonic() + LEAVE_SECONDS
        # The other servers wait for workers only: two that wait for each other would both wait until the deadline.
        all_of_them = self.task == self.coordinator
        others = [keeper for task, keeper in self.peers.items() if all_of_them or task.role is Role.WORKER]
        while any(keeper.linked for keeper in others) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _note_end(self) -> None:
        """Leave the end of the job beside its checkpoints, for a server that comes back when nobody is left."""
        if self.task != self.coordinator or not self.config.train_dir or self.outcome is None or not self.job:
            return
        with suppress(OSError):  # such a server then waits for the others, and says so
            note_end(Path(self.config.train_dir), self.job, ok=self.outcome.ok)

    def fail(self, reason: Reason) -> Outcome:
        """This task cannot continue: notify all tasks, and wait (bounded) for the job to end."""
        self._guard.noticed.set()
        self.dump("failed")
        self.loop.post(Broken(self.task, self.machine.role.step, reason))
        if not self._ended.wait(LEAVE_SECONDS):
            self.outcome = Outcome(False, str(self.task), self.machine.role.step, reason)
        assert self.outcome is not None
        return self.outcome

    def abandon(self, outcome: Outcome) -> None:
        """End here without the coordinator, which is silent."""
        self.loop.call(lambda: self._end(outcome))

    @property
    def cluster(self) -> ClusterSpec:
        return self.config.cluster

    def can_recover(self, task: TaskId) -> bool:
        """Whether the job continues after the loss of this task."""
        if self.rules.survives(task, self.cluster.shape):
            return True
        # While a worker joins, it may be another incarnation of one that the running job waits for.
        return task.role is Role.SERVER and self.rules.takes_back and self.forming

    def dials_next_life(self, peer: TaskId) -> bool:
        """Whether another incarnation of a task that was lost is linked with again: of a server with second homes, of
        a rank that comes back."""
        return self.rules.ranks_return or (bool(self.rules.server_replicas) and peer.role is Role.SERVER)

    def start_facts(self) -> StartFacts:
        """What this task was started with."""
        return start_facts(self.config.cluster, self.config.version, self.config.settings)

    def raise_if_ended(self) -> None:
        """JobEndedError once the job is over."""
        if self.outcome is not None:
            self._guard.noticed.set()
            raise JobEndedError(self.outcome)

    def close(self) -> None:
        """Leave: flush what is queued; free links, memory, port and threads. May be called twice."""
        if self._closed:
            return
        if self.task.role is Role.WORKER and self.sees_others_off and self.outcome is not None:
            self._guard.on_close()  # nobody has to end this process, which may now wait a few seconds
            self.see_others_off()
        self._closed = self.winding_up = True
        for side in self._sides:
            side.stop()
        self._guard.on_close()
        if self._discovery is not None:
            self._discovery.close()
        self._search.close()
        self.watchdog.close()
        # The end of the job wakes this task before the message has reached the others: links stay open until then.
        self.loop.settle(SETTLE_SECONDS)
        for keeper in self.peers.values():
            keeper.begin_closing()
        for keeper in self.peers.values():
            keeper.close()
        if self.config.tell_paths and self.task.role is Role.WORKER:
            for line in self.traffic.lines():
                self.say(f"{self.task.short} {line}")
        self.loop.stop()
        self.transport.close()
        for side in self._sides:
            side.free()
        self._server.stop(0.5)

    # -- what keepers and links need --

    def hello(self) -> Hello:
        published = TransportAddress(self.transport.name, self.transport.address())
        return Hello(str(self.task), self.incarnation, self.job, self.config.version, (published,))

    def envelope(self, message: Message) -> Envelope:
        return Envelope(self.job, str(self.task), self.incarnation, message)

    def post(self, event: Event) -> None:
        self.loop.post(event)

    def do(self, event: Event) -> None:
        self.loop.do(event)

    def refuse(self, peer: TaskId, reason: str) -> None:
        """The requested transport is used, or the run does not start."""
        protocol = self.config.cluster.protocol
        self.refused = True
        why = phrases.cannot_use_protocol(protocol, peer, reason, one_host=stays_on_one_host(protocol))
        self.abandon(Outcome(False, str(self.task), INITIAL_STEP, Reason(Cause.NO_PATH, why, peer=str(peer))))

    def linked(self, peer: TaskId, path: str) -> None:
        self.tell_path(f"{self.task.short} to {peer.short}: {path}")

    def tell_path(self, sentence: str) -> None:
        """Print how tensors travel, if that is configured."""
        if self.config.tell_paths:
            self.say(sentence)

    @property
    def known_plan(self) -> Plan | None:
        return next((side.plan for side in self._sides if side.plan is not None), None)

    @property
    def store_status(self) -> StoreStatus | None:
        return None if self.share is None else self.share.status

    @property
    def shard_write(self) -> ShardWrite | None:
        return None if self.share is None else self.share.shard_write

    @property
    def checkpoint_written(self) -> float:
        """When this task completed a checkpoint, in seconds since 1970; 0: it has not."""
        return 0.0 if self.share is None else self.share.checkpoint_written

    @property
    def has_replica(self) -> bool | None:
        """Whether the loss of any one server would be survived now; None: this task does not know."""
        return None if self.share is None or self.forming else self.share.has_replica

    @property
    def rejoins(self) -> int:
        """How many tasks have come back as another incarnation, as far as this one has seen."""
        return len(self._former)

    @property
    def store_native_id(self) -> int:
        return 0 if self.share is None else self.share.native_id

    def tensors_in(self, bucket: BucketId) -> int:
        plan = self.known_plan
        return len(plan.buckets[bucket].pieces) if plan is not None and 0 <= bucket < len(plan.buckets) else 0

    def lent(self, peer: TaskId, incarnation: Incarnation, note: Note, loan: Loan) -> None:
        """A peer lends memory; on a transport's thread. What no side of this task takes is given back."""
        take = self._takes.get(type(note))
        if take is None:
            loan.release()
        else:
            take(peer, incarnation, note, loan)

    # -- what one side of this task has for the other: no link, and no copy --

    def own_ticket(self) -> Ticket:
        """For what a task lends itself: it does not name any memory."""
        return loan_ticket(self.transport.name, 0)

    def say_to_itself(self, message: Message) -> None:
        """Only for code that runs on the loop."""
        self.loop.then(Received(self.task, self.incarnation, message))

    def lend_to_itself(self, note: Note, number: int, kind: TensorKind, memory: memoryview) -> None:
        """The other side reads ``memory`` until it gives it back. Only for code that runs on the loop."""
        ended = TransferEnded(self.task, number, note.bucket, kind, ok=True)
        loan = HeldLoan(memory, lambda: self.loop.do(ended))
        self.loop.then(lambda: self._takes[type(note)](self.task, self.incarnation, note, loan))

    def _on_hello(self, hello: Hello) -> Hello | Refused:
        refusal = self._why_refused(hello)
        return self.hello() if refusal is None else Refused(refusal)

    @property
    def leaving(self) -> bool:
        """The job is over on this task."""
        return self.outcome is not None or self._closed

    def _why_refused(self, hello: Hello) -> Reason | None:
        """``Cause.UNKNOWN``: for now; asking again later may help."""
        if self.leaving:
            return Reason(Cause.UNKNOWN, phrases.has_left(self.task))
        if hello.version != self.config.version:
            text = phrases.versions_differ(self.task, self.config.version, hello.task, hello.version)
            return Reason(Cause.MISMATCH, text)
        try:
            keeper = self.peers.get(TaskId.parse(hello.task))
        except ValueError as error:
            return Reason(Cause.WIRING, str(error))
        if keeper is None:
            return Reason(Cause.WIRING, phrases.link_not_expected(self.task, hello.task))
        if self.job and hello.job and hello.job != self.job:
            return Reason(Cause.UNKNOWN, phrases.jobs_differ(hello.task, hello.job, self.task, self.job))
        if keeper.has_other_life(hello.incarnation) and keeper.silent:
            return Reason(Cause.UNKNOWN, phrases.former_life_silent(keeper.peer))
        if keeper.has_other_life(hello.incarnation):
            return Reason(Cause.DUPLICATE_TASK, phrases.taken_by_another(hello.task))
        return self._of_another_life(keeper.peer, hello.incarnation)

    def _of_another_life(self, peer: TaskId, incarnation: Incarnation) -> Reason | None:
        """A member that comes back as another process has lost its state; a worker may get it back."""
        known = self._lives.get(peer, incarnation)
        if known == incarnation:
            return None
        rules = self.rules
        if rules.takes_back and peer.role is Role.WORKER:
            if (peer, incarnation) in self._former:
                return Reason(Cause.LEFTOVER_SERVER, phrases.place_taken(peer))
            # The coordinator decides; the others wait for its message.
            knows = self.machine.coordinator is not None
            return None if knows else Reason(Cause.UNKNOWN, phrases.not_told_of_life(self.task, peer))
        self.post(PeerGone(peer, Reason(Cause.STALE_INCARNATION, phrases.former_life_gone(known)), known))
        if rules.server_replicas and (peer, incarnation) not in self._former:
            # The loss of the former one is a matter of a moment, and then this one is welcome.
            return Reason(Cause.UNKNOWN, phrases.not_told_of_life(self.task, peer))
        if rules.returns:
            return Reason(Cause.UNKNOWN, phrases.yet_to_leave(self.task))
        return Reason(Cause.LEFTOVER_SERVER, phrases.runs_with_another_life(peer))

    def _on_link(self, hello: Hello, link: ControlLink) -> LinkEvents:
        return self.peers[TaskId.parse(hello.task)].accept(hello, link)

    # -- effects --

    def _carry_out(self, effect: Effect) -> None:
        self._before(effect)
        self.effects[type(effect)](effect)

    def _own_effects(self) -> dict[type[Effect], Callable[[Any], None]]:
        """What every task does; its sides add theirs."""
        return {
            Send: self._send,
            BecameMember: self._on_member,
            ViewChanged: self._on_view_changed,
            StillMissing: lambda effect: self._say_missing(effect.missing),
            JobEnded: lambda effect: self._end(outcome_of(effect)),
            CallAnswered: self.calls.on_answer,
            GiveBack: lambda effect: self.loans.give_back(effect.arrival),
            Noticed: lambda effect: self.say(phrases.left_out(effect.what)),
            PeerLeaves: lambda effect: self.say(phrases.peer_leaves(self.task, effect.peer, effect.departure)),
        }

    def _send(self, effect: Send) -> None:
        if (keeper := self.peers.get(effect.peer)) is not None:
            keeper.send(effect.message, overtakes=effect.overtakes)

    def _on_member(self, effect: BecameMember) -> None:
        self.job = effect.job
        self.start_step, self.local_state, self.checkpoint = effect.start, effect.state, effect.checkpoint
        self.late, self.replays = effect.late, effect.replays
        self._lives = {TaskId.parse(member.task): member.incarnation for member in effect.members}
        self.reporter.ready(self._server.address, self.incarnation, effect.job)
        self.reporter.phase_unless_importing(TaskPhase.COMPARING_SETTINGS)
        self._member.set()
        self._decided.set()

    def _on_view_changed(self, effect: ViewChanged) -> None:
        here = {TaskId.parse(member.task) for member in effect.members}
        for task in [task for task in self._lives if task not in here]:
            self._former.add((task, self._lives.pop(task)))
        if effect.has_replica != self._has_replica:
            self._has_replica = effect.has_replica
            if self.machine.coordinator is not None and not self.rules.ranks_return:
                self.say(phrases.replica_changed(has_one=effect.has_replica))
                self.watchdog.note_replica(whole=effect.has_replica)
        for member in effect.members:
            task = TaskId.parse(member.task)
            known = self._lives.get(task, member.incarnation)
            if known != member.incarnation:
                self._former.add((task, known))
                self._lives[task] = member.incarnation
                self._said_at.pop(member.task, None)
                self.say(phrases.has_come_back(self.task, task))

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            if not outcome.ok and not self.watchdog.explains(outcome):
                # At once, and not after this task has cleaned up: its watchers need to know now.
                self.say(outcome.sentence())
            if not outcome.ok and not outcome.again:
                self.reporter.failed(outcome.reason.text)
            if outcome.again:
                self.reporter.goes_back()
            else:
                # A task that is refused, or not a member yet, ends by itself, with a better exit code.
                trains = self._member.is_set() and not self.refused
                give_up = self.config.give_up if trains else None
                if self.config.own_program:
                    self._guard.on_end(outcome, PROGRAM_FORCE_SECONDS, give_up, lambda: self.main.doing is Doing.BUSY)
                else:
                    self._guard.on_end(outcome, FORCE_SECONDS, give_up)
            self._tell_departure(outcome)
        self._ended.set()
        self._decided.set()
        self.calls.wake()
        for side in self._sides:
            side.wake()

    # -- what is printed --

    def _say_missing(self, missing: Sequence[MissingTask]) -> None:
        now = time.monotonic()
        due = [one for one in missing if self._is_due(one, now)]
        for one in due[:MOST_SAID]:
            if self._was_member(one):
                self.say(phrases.is_lost(self.task, one.task, one.finding))
            else:
                self.say(phrases.waits_for_missing(self.task, one.task, one.address, one.finding, one.attempts))
        if rest := due[MOST_SAID:]:
            self.say(phrases.waits_for_more(self.task, [one.task for one in rest]))
        self._said_at.update(dict.fromkeys((one.task for one in due), now))

    def _is_due(self, one: MissingTask, now: float) -> bool:
        if now - self._said_at.get(one.task, 0.0) < SAY_SECONDS:
            return False
        return self._was_member(one) or (one.attempts > 0 and one.seconds >= QUIET_SECONDS)

    def _was_member(self, one: MissingTask) -> bool:
        """A member that was lost, rather than a task that has yet to join; this is printed at once."""
        return not one.address and not self.forming
