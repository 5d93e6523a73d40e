"""A worker of a mode without servers: it answers questions about itself, watches its own waits, and finds the others.

The bytes of these modes move inside torch.distributed. A node adds something to ask: the books of
``protocol/worker/collective_machine.py``, a snapshot for ``lockstep why``, and a watchdog that compares the books of
all workers.
There are no links between these nodes, so every worker investigates and ends by itself, with the same verdict.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lockstep.diagnose.collect import collect
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.text import notice_line
from lockstep.errors import BadInput
from lockstep.protocol.core.activity import Doing, InputWait, TaskPhase
from lockstep.protocol.core.causes import Cause, Reason, ReportKind, Source, own_error
from lockstep.protocol.core.effects import Effect, JobEnded
from lockstep.protocol.core.events import (
    Awaited,
    Broken,
    Event,
    Finished,
    Met,
    PeerLeaving,
    Produced,
    Reduced,
    Sealed,
    SignalCame,
    StepBegun,
)
from lockstep.protocol.core.faults import Fault
from lockstep.protocol.core.ids import CHIEF, BucketId, Incarnation, JobId, Step, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import Setting
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import (
    ASK_SECONDS,
    GIVE_UP_SECONDS,
    PROOF_SECONDS,
    QUIET_SECONDS,
    SAY_SECONDS,
    STALL_AFTER_SECONDS,
)
from lockstep.protocol.worker.collective_machine import CollectiveMachine
from lockstep.runtime import phrases
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.start_facts import first_setting_difference, list_difference, start_facts
from lockstep.runtime.startup.startup_query import ask_start
from lockstep.runtime.task.end_guard import EndGuard
from lockstep.runtime.task.introspection import Observed
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.neighbours import Neighbours
from lockstep.runtime.task.outcome import JobEndedError, Outcome, outcome_of
from lockstep.runtime.watch.status import MainThread
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.control.monitor_service import snapshot_handler, witness_handler
from lockstep.transports.control.server import ControlServer
from lockstep.version import __version__

LOOK_SECONDS = 1.0
MOST_NAMED = 5


def node_alone(say: Callable[[str], None], run_folder: str, stall_after: float = STALL_AFTER_SECONDS) -> CollectiveNode:
    """The node of a process that trains alone. No other task can ask it; it prints what takes too long."""
    spec = ClusterSpec(worker_hosts=("127.0.0.1:1",), task=CHIEF, stall_after=stall_after)
    watch = WatchSettings(on_stall="report")  # only a person waits for this process, and can end it
    return CollectiveNode(spec, (), say, TaskReporter.none(), watch=watch, run_folder=run_folder, listens=False)


class StartRefused(Exception):  # noqa: N818 - reads as the fact it states
    """This worker cannot train with the others; the text is one sentence with the remedy. Nothing was started."""


class CollectiveNode(Observed):
    """One worker; with a cluster of one worker it is a process that trains alone."""

    machine: CollectiveMachine

    def __init__(
        self,
        cluster: ClusterSpec,
        settings: tuple[Setting, ...],
        say: Callable[[str], None],
        reporter: TaskReporter,
        *,
        watch: WatchSettings | None = None,
        run_folder: str = "",
        faults: tuple[Fault, ...] = (),
        give_up: Callable[[], None] = lambda: None,
        listens: bool = True,
    ) -> None:
        """``give_up``: ends the process if its training thread does not leave. ``listens``: others may ask it."""
        assert cluster.task is not None
        self.task: TaskId = cluster.task
        self.incarnation: Incarnation = secrets.randbits(63) + 1
        self.job: JobId = 0
        self.journal = Journal()
        self.main = MainThread()
        self.outcome: Outcome | None = None
        self.peers = {}
        self.plan: Plan | None = None
        self.before_look: Callable[[], None] = lambda: None
        """Called every second, on the watchdog's thread: passes to ``summed`` what a device has finished meanwhile."""
        self._cluster = cluster
        self._settings = settings
        self._say = say
        self.reporter = reporter
        self._give_up = give_up
        self._member = threading.Event()
        self._left = threading.Event()
        self._guard = EndGuard(lambda: phrases.does_not_return(self.task, self.main.doing), say, reporter)
        self._step: Step = -1
        workers = len(cluster.worker_hosts)
        now = time.monotonic()
        self.machine = CollectiveMachine(self.task, self.incarnation, workers, cluster.stall_after, self.journal, now)
        self.loop = TaskLoop(self.machine, self._carry_out)
        self._server = self._listen() if listens else None
        self._neighbours = Neighbours(self.task, self._others() if listens else {}, self._on_peer_leaving)
        self._begin_observing(say, watch or WatchSettings(on_stall=cluster.on_stall), run_folder, faults)

    def _listen(self) -> ControlServer:
        host, own = self._cluster.listen_address().host, parse_address(self._cluster.address_of(self.task)).host
        server = ControlServer(host, 0, threads=16, advertised_host=own, ports=self._cluster.second_ports)
        witness = witness_handler(self._statement_about)
        server.add_handlers("Task", {"Snapshot": snapshot_handler(self._snapshot_json), "Witness": witness})
        return server

    # -- from start to close --

    def start(self) -> None:
        """Listen, and report the address to the monitor."""
        if self._server is not None:
            self._server.start()
            self.reporter.ready(self._server.address, self.incarnation, self.job)
        self.reporter.phase(TaskPhase.CONNECTING)
        self.loop.start()
        self._neighbours.start()
        self.watchdog.start()

    def find_others(self) -> None:
        """Block until every other worker answers; prints which are missing. JobEndedError after ``startup_timeout``.

        StartRefused if one of them was started with other settings: a silent difference must not start.
        """
        deadline = time.monotonic() + self.cluster.startup_timeout
        said_at = time.monotonic() - SAY_SECONDS + QUIET_SECONDS
        while missing := self._missing():
            self.raise_if_ended()
            self.post(Awaited(tuple(TaskId.parse(task) for task in missing)))
            now = time.monotonic()
            named = list(missing.items())
            if now >= deadline:
                text = phrases.workers_missing(self.cluster.startup_timeout, phrases.listed(named[:MOST_NAMED]))
                reason = Reason(Cause.NEVER_STARTED, text)
                raise JobEndedError(Outcome(False, next(iter(missing)), -1, reason))
            if now - said_at >= SAY_SECONDS:
                said_at = now
                self._say(phrases.waits_for_workers(self.task, len(self._others()), named, MOST_NAMED))
            self._left.wait(min(LOOK_SECONDS, max(0.05, deadline - now)))
        self._compare()

    def wait_until_member(self) -> None:
        """As ``find_others``; BadInput carries what differs."""
        try:
            self.find_others()
        except StartRefused as refused:
            raise BadInput(str(refused)) from None

    def _others(self) -> dict[str, str]:
        return {task: address for task, address in self.cluster.all_addresses() if task != str(self.task)}

    def _missing(self) -> dict[str, str]:
        found = collect(self._others(), ASK_SECONDS)
        return {task: _why_missing(seen) for task, seen in found.items() if seen.view is None}

    def _compare(self) -> None:
        """Compare settings with the chief, whose settings count; the chief compares nothing."""
        if self.task == CHIEF:
            return
        theirs = ask_start(self.cluster.address_of(CHIEF))
        if theirs is None:
            return
        ours = start_facts(self.cluster, __version__, self._settings)
        difference = list_difference(ours, theirs) or first_setting_difference(ours, theirs)
        if difference is not None:
            raise StartRefused(difference)

    def met(self, job: JobId, lives: tuple[Incarnation, ...]) -> None:
        """All workers have met in job ``job``."""
        self.job = job
        self.reporter.joined(job)
        self._member.set()
        self.post(Met(lives))

    def close(self) -> None:
        """Stop answering; may be called twice."""
        if self._left.is_set():
            return
        self._left.set()
        self.winding_up = True
        self._guard.on_close()
        self._neighbours.close()
        self.watchdog.close()
        self.loop.settle(1.0)
        self.loop.stop()
        if self._server is not None:
            self._server.stop(0.5)

    # -- called by the training thread --

    def phase(self, phase: TaskPhase) -> None:
        """Report to the monitor where the training loop is."""
        self.reporter.phase(phase)

    def begin_step(self, step: Step) -> None:
        self._step = step
        self.post(StepBegun(step, ()))
        self.main.enter(Doing.COMPUTING, f"step {step}")

    def waits_for_input(self, wait: InputWait) -> None:
        """The training thread waits for data, which means that the next step has begun."""
        if not self._others() and self.main.doing is Doing.USER_CODE:
            self.post(StepBegun(self._step + 1, ()))
        self.main.wait_for_input(wait)

    def handed_over(self, step: Step, bucket: BucketId) -> None:
        self.post(Produced(step, bucket))

    def computes_on(self, replica: int) -> None:
        """The training thread has reached this device."""
        self.main.enter(Doing.COMPUTING, f"step {self._step}, replica {replica}")

    def backward_ended(self, step: Step) -> None:
        self.post(Sealed(step, (), ()))
        self.main.enter(Doing.WAITING, f"the sum of step {step}")

    def summed(self, step: Step, bucket: BucketId) -> None:
        self.post(Reduced(step, bucket))

    def between_steps(self) -> None:
        self.main.enter(Doing.USER_CODE)

    def step_done(self) -> None:
        """A process alone has made its next parameters."""
        self.post(Sealed(self._step, (), ()))
        self.between_steps()

    def finishing(self) -> None:
        self.reporter.phase(TaskPhase.FINISHING)
        self.main.enter(Doing.FINISHING)
        self.post(Finished(self._step + 1))

    @property
    def keeps_state(self) -> bool:
        """No task keeps it for another."""
        return False

    @property
    def saves(self) -> bool:
        """There is no checkpoint without the state of every worker."""
        return False

    local_state = b""

    def tell_state(self, step: Step, data: bytes, stuck: str = "") -> None:
        """Nobody asks for it."""

    def fail(self, reason: Reason) -> Outcome:
        """This worker cannot continue. The others find out from its monitor."""
        if self.outcome is None:
            self.dump("failed")
            self._ended_by(Outcome(False, str(self.task), self._step, reason))
        assert self.outcome is not None
        return self.outcome

    def raise_if_ended(self) -> None:
        """JobEndedError once the watchdog has given up on the job."""
        if self.outcome is not None:
            raise JobEndedError(self.outcome)

    def lost(self, problem: str) -> JobEndedError:
        """torch.distributed has failed: find out why, within seconds, report it, and return the error to raise."""
        deadline = time.monotonic() + PROOF_SECONDS
        while True:
            self.raise_if_ended()
            diagnosis = self.watchdog.look_now()
            verdict = diagnosis.verdict
            if (verdict is not None and verdict.proven and not verdict.warning) or time.monotonic() >= deadline:
                break
            self._left.wait(0.2)
        if verdict is None or not verdict.proven:
            known = "" if verdict is None else notice_line(verdict)
            self.dump("failed")
            reason = own_error(phrases.cannot_reduce(problem, known))
            return self._ended_by(Outcome(False, str(self.task), self._step, reason))
        verdict = replace(verdict, evidence=(*verdict.evidence, phrases.collective_failed(self.task, problem)))
        self.watchdog.report(ReportKind.VERDICT, replace(diagnosis, verdict=verdict, ends=True))
        reason = Reason(verdict.cause, verdict.what, Source.VERDICT, verdict.peer, verdict.host, verdict.pid)
        return self._ended_by(Outcome(False, verdict.culprit, verdict.step, reason))

    def drifted(self, step: Step, other: TaskId, parameter: str) -> JobEndedError:
        """The parameters of two workers differ, which every worker sees at the same time."""
        reason = own_error(phrases.drifted(CHIEF, parameter))
        self.dump("failed")
        return self._ended_by(Outcome(False, str(other), step, reason))

    def _ended_by(self, outcome: Outcome) -> JobEndedError:
        self.outcome = outcome
        self.reporter.failed(outcome.reason.text)
        return JobEndedError(outcome)

    # -- what Observed needs --

    @property
    def known_plan(self) -> Plan | None:
        return self.plan

    @property
    def cluster(self) -> ClusterSpec:
        return self._cluster

    @property
    def leaving(self) -> bool:
        return self.outcome is not None or self._left.is_set()

    def beat(self) -> None:
        self.before_look()
        super().beat()

    def post(self, event: Event) -> None:
        if isinstance(event, SignalCame):
            self.reporter.leaves(str(self.task), event.departure)
        self.loop.post(event)

    def _on_peer_leaving(self, peer: TaskId, departure: Departure) -> None:
        """Called on a watch's thread. Worker 0 forwards it to the workers that follow it."""
        if self.outcome is None and peer != self.task:
            self.reporter.leaves(str(peer), departure)
            self.post(PeerLeaving(peer, departure))

    def can_recover(self, task: TaskId) -> bool:  # noqa: ARG002 - every node has this signature
        """Never: without servers no task keeps what a lost worker would need to come back."""
        return False

    def abandon(self, outcome: Outcome) -> None:
        self.post(Broken(TaskId.parse(outcome.culprit), outcome.step, outcome.reason))

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, JobEnded) and self.outcome is None:
            outcome = outcome_of(effect)
            self._ended_by(outcome)
            if outcome.departure is not None:
                self._say(outcome.sentence())
                self._tell_departure(outcome)
            self._guard.on_end(outcome, GIVE_UP_SECONDS, lambda _outcome: self._give_up())


def _why_missing(seen: Seen) -> str:
    if seen.monitor is None:
        return seen.monitor_silence.text or phrases.nobody_answers()
    if seen.monitor.task != seen.task:
        return phrases.there_instead(seen.monitor.task)
    if seen.monitor.exited:
        return phrases.exit_code(seen.monitor.exit_code)
    return phrases.is_up_in(seen.monitor.phase)


__all__ = ["CollectiveNode", "StartRefused", "node_alone"]
