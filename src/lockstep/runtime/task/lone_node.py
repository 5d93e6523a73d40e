"""The node of a process that trains alone. No other task can ask it; it prints what takes too long."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from lockstep.protocol.core.activity import Doing, InputWait, ShardWrite, TaskPhase
from lockstep.protocol.core.effects import Effect, JobEnded
from lockstep.protocol.core.events import Broken, Event, Sealed, SignalCame, StepBegun
from lockstep.protocol.core.ids import CHIEF, Incarnation, JobId, Step, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import STALL_AFTER_SECONDS
from lockstep.protocol.worker.lone_machine import LoneMachine
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.outcome import Outcome, outcome_of
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.watch.reporting import Publisher
from lockstep.runtime.watch.snapshot import StoreStatus
from lockstep.runtime.watch.status import MainThread, Sampler
from lockstep.runtime.watch.watchdog import Watchdog, WatchSettings


class LoneNode:
    """Watches over the one training thread."""

    winding_up = False
    """The main thread knows that the run is over, and closes everything."""
    on_departure: Callable[[Departure], None] = staticmethod(lambda _departure: None)
    """Called when a signal has ended the run; must not block."""
    sees_others_off = False
    known_plan: Plan | None = None
    store_status: StoreStatus | None = None
    store_native_id = 0
    shard_write: ShardWrite | None = None

    def __init__(self, say: Callable[[str], None], run_folder: str, stall_after: float = STALL_AFTER_SECONDS) -> None:
        self.task: TaskId = CHIEF
        self.incarnation: Incarnation = secrets.randbits(63) + 1
        self.job: JobId = 0
        self.journal = Journal()
        self.main = MainThread()
        self.outcome: Outcome | None = None
        self.peers: dict[TaskId, PeerKeeper] = {}
        self.reporter = TaskReporter.none()
        self.cluster = ClusterSpec(worker_hosts=("127.0.0.1:1",), task=CHIEF, stall_after=stall_after)
        self._say = say
        self._ready = threading.Event()
        self._left = threading.Event()
        self._step: Step = -1
        self.machine = LoneMachine(self.task, stall_after, self.journal, time.monotonic())
        self.loop = TaskLoop(self.machine, self._carry_out)
        watch = WatchSettings(on_stall="report")  # only a person waits for this process, and can end it
        self.sampler = Sampler(self, time.monotonic())
        self.publisher = Publisher(self, say, run_folder, watch.pages)
        self.watchdog = Watchdog(self, watch, self.publisher)

    def start(self) -> None:
        self.reporter.phase(TaskPhase.CONNECTING)
        self.loop.start()
        self.watchdog.start()

    def close(self) -> None:
        """May be called twice."""
        if self._left.is_set():
            return
        self._left.set()
        self.winding_up = True
        self.watchdog.close()
        self.loop.settle(1.0)
        self.loop.stop()

    # -- called by the training thread --

    def ready(self) -> None:
        """The model is there."""
        self.job = self.incarnation
        self._ready.set()

    def begin_step(self, step: Step) -> None:
        self._step = step
        self.post(StepBegun(step, ()))
        self.main.enter(Doing.COMPUTING, f"step {step}")

    def waits_for_input(self, wait: InputWait) -> None:
        """The training thread waits for data, which means that the next step has begun."""
        if self.main.doing is Doing.USER_CODE:
            self.post(StepBegun(self._step + 1, ()))
        self.main.wait_for_input(wait)

    def computes_on(self, replica: int) -> None:
        """The training thread has reached this device."""
        self.main.enter(Doing.COMPUTING, f"step {self._step}, replica {replica}")

    def step_done(self) -> None:
        """The next parameters are made."""
        self.post(Sealed(self._step, (), ()))
        self.main.enter(Doing.USER_CODE)

    # -- what watches this process needs --

    @property
    def phase_now(self) -> str:
        return self.reporter.report.phase

    @property
    def forming(self) -> bool:
        return not self._ready.is_set()

    @property
    def coordinator(self) -> TaskId:
        return self.task

    @property
    def leaving(self) -> bool:
        return self.outcome is not None or self._left.is_set()

    def post(self, event: Event) -> None:
        if isinstance(event, SignalCame):
            self.reporter.leaves(str(self.task), event.departure)
        self.loop.post(event)

    def usual(self) -> float:
        return self.watchdog.threshold()

    def beat(self) -> None:
        self.reporter.beat()

    def report_printed(self) -> None:
        self.reporter.printed()

    def can_recover(self, task: TaskId) -> bool:  # noqa: ARG002 - every node has this signature
        return False

    def abandon(self, outcome: Outcome) -> None:
        self.post(Broken(TaskId.parse(outcome.culprit), outcome.step, outcome.reason))

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, JobEnded) and self.outcome is None:
            self.outcome = outcome_of(effect)
            self.reporter.failed(self.outcome.reason.text)
            if self.outcome.departure is not None:
                self._say(self.outcome.sentence())
                self.reporter.leaves(self.outcome.culprit, self.outcome.departure)
                self.on_departure(self.outcome.departure)
