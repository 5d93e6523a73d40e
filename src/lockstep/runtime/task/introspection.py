"""The observable side of a node: snapshot, watchdog, reports, and the faults that a drill has planted."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lockstep.diagnose.witness import ask_witnesses, make_statement
from lockstep.protocol.core.activity import ShardWrite
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.effects import Effect, JobEnded, Send
from lockstep.protocol.core.events import Event
from lockstep.protocol.core.faults import Fault
from lockstep.protocol.core.ids import Incarnation, JobId, TaskId, hex64
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.machine import WholeTask
from lockstep.protocol.core.messages import End, Printed, Report
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.speakers import may_say
from lockstep.protocol.core.timing import HEARD_SECONDS
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.injection import Injector
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.watch.reporting import Publisher
from lockstep.runtime.watch.snapshot import StoreStatus, snapshot_of
from lockstep.runtime.watch.status import MainThread, Sampler
from lockstep.runtime.watch.watchdog import Watchdog, WatchSettings


class Observed(ABC):
    """What lets others see what a node does. It makes no decision of the protocol."""

    task: TaskId
    incarnation: Incarnation
    job: JobId
    journal: Journal
    machine: WholeTask
    loop: TaskLoop
    peers: dict[TaskId, PeerKeeper]
    outcome: Outcome | None
    reporter: TaskReporter
    _member: threading.Event
    winding_up = False
    """The main thread knows that the job is over, and closes everything."""
    on_departure: Callable[[Departure], None] = staticmethod(lambda _departure: None)
    """Called when a signal, to any task, has ended the job here; must not block."""

    def _begin_observing(
        self, say: Callable[[str], None], settings: WatchSettings, folder: str, faults: tuple[Fault, ...]
    ) -> None:
        """Called once the rest of the node exists, and before it starts."""
        self.sampler = Sampler(self, time.monotonic())
        self._publisher = Publisher(self, say, folder, settings.pages)
        self.watchdog = Watchdog(self, settings, self._publisher)
        self.faults: Injector | None = None
        if faults:
            self.faults = Injector(self.task, faults, lambda name: self._publisher.note(ReportKind.INJECTED, text=name))

    # -- what a snapshot shows --

    main: MainThread

    @property
    def phase_now(self) -> str:
        return self.reporter.report.phase

    @property
    def known_plan(self) -> Plan | None:
        """The plan, once there is one."""
        return None

    @property
    def store_status(self) -> StoreStatus | None:
        """What the thread of a server's store is doing; None on a worker."""
        return None

    @property
    def shard_write(self) -> ShardWrite | None:
        """The part of a checkpoint that a server is writing."""
        return None

    @property
    def store_native_id(self) -> int:
        return 0

    @property
    def sees_others_off(self) -> bool:
        """Whether other tasks depend on this one until they have left."""
        return False

    @property
    def folder(self) -> str:
        """The folder of the run, or the one in which it will be created."""
        return str(self._publisher.folder.nearest)

    @property
    def publisher(self) -> Publisher:
        return self._publisher

    @property
    def forming(self) -> bool:
        """The cluster is not complete yet."""
        return not self._member.is_set()

    # -- what the classes of nodes know themselves --

    @property
    @abstractmethod
    def cluster(self) -> ClusterSpec: ...

    @property
    @abstractmethod
    def coordinator(self) -> TaskId:
        """The task that decides for the job now."""

    @property
    @abstractmethod
    def leaving(self) -> bool:
        """The job is over on this task."""

    @abstractmethod
    def post(self, event: Event) -> None:
        """Hand an event to the machines; returns at once."""

    @abstractmethod
    def abandon(self, outcome: Outcome) -> None:
        """End here without the coordinator, which is silent."""

    @abstractmethod
    def can_recover(self, task: TaskId) -> bool:
        """Whether the job continues after the loss of this task."""

    # -- the watchdog --

    def beat(self) -> None:
        """Report to the monitor that this task's threads run."""
        self.reporter.beat()

    def usual(self) -> float:
        """How long a wait may take before it is investigated."""
        return self.watchdog.threshold()

    def snapshot(self) -> dict[str, Any]:
        """The state of this task as plain JSON values."""
        return snapshot_of(self)

    def _snapshot_json(self) -> bytes:
        return json.dumps(self.snapshot()).encode()

    # -- tasks that others miss --

    def _statement_about(self, name: str) -> bytes:
        """JSON of what this task knows of another one of the cluster; on a thread of gRPC."""
        address = dict(self.cluster.all_addresses()).get(name)
        if address is None:
            return b"{}"
        keeper = self.peers.get(TaskId.parse(name))
        heard = keeper is not None and keeper.linked and keeper.seconds_unheard(time.monotonic()) < HEARD_SECONDS
        return make_statement(address, heard=heard)

    def words_about(self, peer: TaskId, incarnation: Incarnation) -> list[Word]:
        """What all other tasks know of this incarnation of ``peer``; waits for their answers."""
        here = (str(self.task), str(peer))
        fronts = {task: address for task, address in self.cluster.all_addresses() if task not in here}
        return [said.word(hex64(incarnation)) for said in ask_witnesses(str(peer), fronts).values()]

    # -- reports --

    def report_received(self, peer: TaskId, report: Report | Printed) -> bool:
        """The coordinator has found something, or printed it; on a link's thread. False: it was not the coordinator."""
        if not may_say(peer, report, self.coordinator):
            return False
        self.watchdog.heard(report)
        return True

    def report_printed(self) -> None:
        """Report to the monitor that a report is on this task's terminal: tasks without a link to this one ask it."""
        self.reporter.printed()

    def dump(self, why: str) -> None:
        """Write snapshot and journal of this task to the folder of the run."""
        self.watchdog.dump(why)

    def _tell_departure(self, outcome: Outcome) -> None:
        """Notify the monitor, and the handler that makes this process end, that a signal has ended the job."""
        if outcome.departure is not None:
            self.reporter.leaves(outcome.culprit, outcome.departure)
            self.on_departure(outcome.departure)

    def write_files(self, why: str) -> None:
        """The same for a person who asked for it; prints where the files are."""
        self._publisher.dump(why, tells=True)

    def _before(self, effect: Effect) -> None:
        """An effect is about to be carried out; on the loop's thread."""
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
