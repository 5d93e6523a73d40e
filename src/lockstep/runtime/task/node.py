"""One task, from its start to its close. Its sides (``side.py``) add what it does with tensors.

A node puts together what has one purpose each: its machines and their loop, its links (``links.py``), whom it links
with (``admission.py``), its watchdog and reports (``runtime/watch``), what others may ask (``introspection.py``).
Nothing here is global, so any number of nodes can run in one process (most tests do that).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.protocol.core.activity import Doing, ShardWrite, TaskPhase
from lockstep.protocol.core.causes import Reason
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
from lockstep.protocol.core.events import Broken, Event
from lockstep.protocol.core.ids import INITIAL_STEP, Incarnation, JobId, Role, Step, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import End
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.timing import FORCE_SECONDS, LEAVE_SECONDS, PROGRAM_FORCE_SECONDS, SETTLE_SECONDS
from lockstep.protocol.task import TaskMachine
from lockstep.runtime import phrases
from lockstep.runtime.checkpoint.ending import note_end
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.start_facts import StartFacts, start_facts
from lockstep.runtime.task.admission import Admission
from lockstep.runtime.task.call_desk import CallDesk
from lockstep.runtime.task.discovery import Discovery, Search
from lockstep.runtime.task.end_guard import EndGuard
from lockstep.runtime.task.injection import Injector
from lockstep.runtime.task.introspection import answer_about
from lockstep.runtime.task.job_before import JobBefore
from lockstep.runtime.task.links import Links
from lockstep.runtime.task.loans import Loans
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.machines import make_machines
from lockstep.runtime.task.missing_notices import MissingNotices
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import JobEndedError, Outcome, outcome_of
from lockstep.runtime.task.side import Side, plan_of
from lockstep.runtime.trace.traffic import Traffic
from lockstep.runtime.watch.reporting import Publisher
from lockstep.runtime.watch.snapshot import StoreStatus
from lockstep.runtime.watch.status import MainThread, Sampler
from lockstep.runtime.watch.watchdog import Watchdog

if TYPE_CHECKING:
    from lockstep.runtime.task.share_side import ShareSide

Say = Callable[[str], None]
LEFT_LOOK_SECONDS = 0.2
LOOKS_FOR_NOBODY = 3
"""After this many checks that find nothing at the coordinator's address, the job is over."""


class Node:
    """What all tasks have in common. Their constructors make the sides and put them together (``_compose``)."""

    machine: TaskMachine
    share: ShareSide | None = None
    """The side that keeps a share of the buckets, in a task that has one."""
    winding_up = False
    """The main thread knows that the job is over, and closes everything."""
    on_departure: Callable[[Departure], None] = staticmethod(lambda _departure: None)
    """Called when a signal, to any task, has ended the job here; must not block."""

    def __init__(self, config: NodeConfig, say: Say, reporter: TaskReporter, *, carries_tensors: bool = True) -> None:
        """``carries_tensors``: whether tensors take its links; else only messages do."""
        self.config = config
        self.cluster: ClusterSpec = config.cluster
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
        self.links = Links(self, carry_tensors=carries_tensors)
        self.transport, self.peers = self.links.transport, self.links.peers
        self._admission = Admission(self)
        self._missing = MissingNotices(self.task, say, lambda: self.forming)

    def _compose(self, *sides: Side) -> None:
        """Put the machines and the rest of the node together; the last thing that a constructor does."""
        config, links = self.config, self.links
        self._sides = sides
        self._saving = next((side.saving for side in sides if side.saving is not None), None)
        self.effects = self._own_effects() | {kind: act for side in sides for kind, act in side.effects().items()}
        roles = [side.machine for side in sides]
        self.machine = make_machines(config, self.incarnation, roles, self.journal, time.monotonic())
        self.loop = TaskLoop(self.machine, self._carry_out)
        self._discovery = Discovery(self) if self.machine.coordinator is not None else None
        dialed = [keeper for keeper in self.peers.values() if keeper.dials]
        tasks = len(self.cluster.shape.tasks())
        self._search = Search(dialed, self.start_facts, self._missing.tell, lambda: self.leaving, tasks)
        self.sampler = Sampler(self, time.monotonic())
        self.publisher = Publisher(self, self.say, config.run_folder, config.watch.pages)
        self.watchdog = Watchdog(self, config.watch, self.publisher)
        self.faults = Injector.of(self.task, config.faults, self.publisher.note_injected)
        links.connect(self.loop, sides, self.faults, self._admission.on_hello)
        answer_about(self, links.server)

    # -- from start to close --

    def start(self) -> None:
        """Listen, report the address to the monitor, and look for the others."""
        for side in self._sides:
            side.start()
        self.links.server.start()
        self.reporter.ready(self.links.server.address, self.incarnation, self.job)
        self.reporter.phase(TaskPhase.CONNECTING)
        self.loop.start()
        self.links.start(returning=self.config.returning)
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
        """Whether other tasks depend on this one until they have left."""
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
        self.watchdog.dump("failed")
        self.loop.post(Broken(self.task, self.machine.role.step, reason))
        if not self._ended.wait(LEAVE_SECONDS):
            self.outcome = Outcome(False, str(self.task), self.machine.role.step, reason)
        assert self.outcome is not None
        return self.outcome

    def abandon(self, outcome: Outcome) -> None:
        """End here without the coordinator, which is silent."""
        self.loop.call(lambda: self._end(outcome))

    def refuse(self, reason: Reason) -> None:
        """What was asked for is not possible here; the run does not start."""
        self.refused = True
        self.abandon(Outcome(False, str(self.task), INITIAL_STEP, reason))

    def post(self, event: Event) -> None:
        """Hand an event to the machines; returns at once."""
        self.loop.post(event)

    def can_recover(self, task: TaskId) -> bool:
        """Whether the job continues after the loss of this task."""
        if self.rules.survives(task, self.cluster.shape):
            return True
        # While a worker joins, it may be another incarnation of one that the running job waits for.
        return task.role is Role.SERVER and self.rules.takes_back and self.forming

    @property
    def saves(self) -> bool:
        """Whether the job writes checkpoints while it runs."""
        return self.rules.saves

    @property
    def keeps_state(self) -> bool:
        """Whether the local state of every step must be told, for the next incarnation of this worker."""
        return self.rules.keeps_states

    def phase(self, phase: TaskPhase) -> None:
        """Report to the monitor where the training loop is."""
        self.reporter.phase(phase)

    def start_facts(self) -> StartFacts:
        """What this task was started with."""
        return start_facts(self.config.cluster, self.config.version, self.config.settings)

    def tell_path(self, sentence: str) -> None:
        """Print how tensors travel, if that is configured."""
        if self.config.tell_paths:
            self.say(sentence)

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
        self.links.hang_up()
        if self.config.tell_paths and self.task.role is Role.WORKER:
            for line in self.traffic.lines():
                self.say(f"{self.task.short} {line}")
        self.loop.stop()
        self.transport.close()
        for side in self._sides:
            side.free()
        self.links.server.stop(0.5)

    # -- what watches this task needs --

    @property
    def phase_now(self) -> str:
        return self.reporter.report.phase

    @property
    def forming(self) -> bool:
        """The cluster is not complete yet."""
        return not self._member.is_set()

    @property
    def leaving(self) -> bool:
        """The job is over on this task."""
        return self.outcome is not None or self._closed

    @property
    def known_plan(self) -> Plan | None:
        """The plan, once there is one."""
        return plan_of(self._sides)

    @property
    def store_status(self) -> StoreStatus | None:
        """What the thread of a server's store is doing; None on a worker."""
        return None if self.share is None else self.share.status

    @property
    def store_native_id(self) -> int:
        return 0 if self.share is None else self.share.native_id

    @property
    def shard_write(self) -> ShardWrite | None:
        """The part of a checkpoint that this task is writing."""
        return None if self._saving is None else self._saving.writing

    @property
    def checkpoint_written(self) -> float:
        """When this task completed a checkpoint, in seconds since 1970; 0: it has not."""
        return 0.0 if self._saving is None else self._saving.written_at

    @property
    def has_replica(self) -> bool | None:
        """Whether the loss of any one server would be survived now; None: this task does not know."""
        return None if self.share is None or self.forming else self.share.has_replica

    @property
    def rejoins(self) -> int:
        """How many tasks have come back as another incarnation, as far as this one has seen."""
        return self._admission.rejoins

    def usual(self) -> float:
        """How long a wait may take before it is investigated."""
        return self.watchdog.threshold()

    def beat(self) -> None:
        """Report to the monitor that this task's threads run."""
        for side in self._sides:
            side.beat()
        self.reporter.beat()

    def report_printed(self) -> None:
        """Report to the monitor that a report is on this task's terminal: tasks without a link to this one ask it."""
        self.reporter.printed()

    # -- effects --

    def _carry_out(self, effect: Effect) -> None:
        # Plain comparisons of types, because this runs for every effect.
        kind = type(effect)
        if kind is Send:
            assert isinstance(effect, Send)
            if type(end := effect.message) is End and not (end.ok or end.again or end.departure):
                self.watchdog.job_ends(end.culprit, end.step, end.reason)
        elif kind is JobEnded:
            assert isinstance(effect, JobEnded)
            if not (effect.ok or effect.again or effect.departure):
                self.watchdog.job_ends(effect.culprit, effect.step, effect.reason)
        if self.faults is not None:
            self.faults.in_loop(self.machine.role.step)
        self.effects[kind](effect)

    def _own_effects(self) -> dict[type[Effect], Callable[[Any], None]]:
        """What every task does; its sides add theirs."""
        return {
            Send: self._send,
            BecameMember: self._on_member,
            ViewChanged: self._on_view_changed,
            StillMissing: lambda effect: self._missing.tell(effect.missing),
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
        self._admission.begin(effect.members)
        self.reporter.ready(self.links.server.address, self.incarnation, effect.job)
        self.reporter.phase_unless_importing(TaskPhase.COMPARING_SETTINGS)
        self._member.set()
        self._decided.set()

    def _on_view_changed(self, effect: ViewChanged) -> None:
        returned = self._admission.change(effect.members)
        if effect.has_replica != self._has_replica:
            self._has_replica = effect.has_replica
            if self.machine.coordinator is not None and not self.rules.ranks_return:
                self.say(phrases.replica_changed(has_one=effect.has_replica))
                self.watchdog.note_replica(whole=effect.has_replica)
        for task in returned:
            self._missing.forget(task)
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
            if outcome.departure is not None:
                self.reporter.leaves(outcome.culprit, outcome.departure)
                self.on_departure(outcome.departure)
        self._ended.set()
        self._decided.set()
        self.calls.wake()
        for side in self._sides:
            side.wake()
