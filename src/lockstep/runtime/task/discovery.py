"""Finds out, while the cluster forms, what is at the address of each task that is missing.

The coordinator looks for every task that has not joined (``Discovery``), any other task for those that it must reach
itself (``Search``). Both report not only that a task is missing but why, as far as others know: a task that is up is
asked what *it* sees, and the command lines are compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from lockstep.protocol.core.events import Event, Searched
from lockstep.protocol.core.ids import JobId, TaskId
from lockstep.protocol.core.messages import MissingTask
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.timing import ASK_AFTER_SECONDS, COMPARE_SECONDS, SEARCH_JOIN_SECONDS, SEARCH_SECONDS
from lockstep.protocol.task import TaskMachine
from lockstep.runtime.startup.address_finding import AddressFinding, ask_seconds, look
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.runtime.startup.startup_query import ask_start, difference_with_any, why_it_does_not_come
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.transports.guard import Guard

LOOP_SECONDS = 1.0
"""How long the loop may take to report which tasks are missing."""
PROBE_SECONDS_PER_TASK = 0.05
"""The more tasks, the less often: each query costs both sides a few milliseconds."""
PROBES_AT_ONCE = 4
ASK_AFTER_PER_TASK = 0.25
"""A healthy large cluster takes longer, because all tasks start at once; and if all asked all, none could start."""
ASKED_A_ROUND = 4
"""How many of the tasks that are up but have not joined are asked why, per round."""


def ask_after(tasks: int) -> float:
    """How long the tasks of a cluster of this size have before they are asked why they do not join."""
    return max(ASK_AFTER_SECONDS, ASK_AFTER_PER_TASK * tasks)


class _Config(Protocol):
    @property
    def cluster(self) -> ClusterSpec: ...


class Coordinating(Protocol):
    """What discovery needs from its node."""

    machine: TaskMachine
    loop: TaskLoop
    peers: dict[TaskId, PeerKeeper]

    @property
    def config(self) -> _Config: ...

    def start_facts(self) -> StartFacts: ...

    def post(self, event: Event) -> None: ...


class Discovery:
    """Looks at the addresses of missing tasks every second and passes the findings to the coordinator."""

    def __init__(self, node: Coordinating) -> None:
        self._node = node
        self._since = time.monotonic()
        self._attempts: dict[TaskId, int] = {}
        self._found: dict[TaskId, tuple[Reach, float]] = {}
        self._up_since: dict[TaskId, float] = {}
        self._reasons: dict[TaskId, str] = {}
        """The answers of tasks that were asked why they do not join."""
        tasks = len(node.config.cluster.shape.tasks())
        self._ask_after, self._ask_seconds = ask_after(tasks), ask_seconds(tasks)
        self._asked_at: dict[TaskId, float] = {}
        self._may_ask: frozenset[TaskId] = frozenset()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(SEARCH_JOIN_SECONDS)

    def _run(self) -> None:
        coordinator = self._node.machine.coordinator
        assert coordinator is not None
        with ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="probe") as pool:
            guard = Guard("the search for missing tasks")
            while not self._stop.is_set() and self._node.machine.coordinator is coordinator:
                missing = self._node.loop.ask(coordinator.missing, LOOP_SECONDS)
                if missing == ():
                    return
                if missing is None:
                    continue  # the loop is busy; it answers later, or the task leaves
                guard.passes(partial(self._search, missing, pool))
                self._stop.wait(SEARCH_SECONDS + PROBE_SECONDS_PER_TASK * len(missing))

    def _search(self, missing: tuple[TaskId, ...], pool: ThreadPoolExecutor) -> None:
        self._may_ask = self._whose_turn(missing)
        self._node.post(Searched(tuple(pool.map(self._look, missing))))

    def _whose_turn(self, missing: Iterable[TaskId]) -> frozenset[TaskId]:
        """The tasks to ask for their reasons in this round: a few, in turn."""
        now = time.monotonic()
        up = [task for task in missing if now - self._up_since.get(task, now) >= self._ask_after]
        turn = sorted(up, key=lambda task: self._asked_at.get(task, 0.0))[:ASKED_A_ROUND]
        self._asked_at.update(dict.fromkeys(turn, now))
        return frozenset(turn)

    def _look(self, task: TaskId) -> MissingTask:
        address = self._node.config.cluster.address_of(task)
        self._attempts[task] = self._attempts.get(task, 0) + 1
        now = time.monotonic()
        finding = self._node.peers[task].last_end.with_end(look(task, address, self._ask_seconds), now)
        known, since = self._found.get(task, (None, now))
        if known is not finding.answer:
            since = now
        self._found[task] = (finding.answer, since)
        text = self._reason(task, address, finding, now) or finding.phrase(now - since)
        return MissingTask(str(task), address, text, now - self._since, self._attempts[task])

    def _reason(self, task: TaskId, address: str, finding: AddressFinding, now: float) -> str:
        """Why a task that is up has not joined; empty if there is no reason to report, or not yet."""
        found = finding.description
        if found is None or found.exited:
            self._up_since.pop(task, None)
            self._reasons.pop(task, None)
            return ""
        coordinator = self._node.machine.coordinator
        if coordinator is None:
            return ""  # another server coordinates
        if found.job not in (0, coordinator.job):
            return belongs_elsewhere(found.job, found.phase, found.phase_seconds, found.pid, found.host)
        self._up_since.setdefault(task, now)
        if task in self._may_ask:
            self._reasons[task] = why_it_does_not_come(self._node.start_facts(), finding, address)
        return self._reasons.get(task, "")


def belongs_elsewhere(job: JobId, phase: str, seconds: float, pid: int, host: str) -> str:
    """A task of another job answers, most likely a leftover."""
    return (
        f"belongs to another job, {job:016x} ({phase} for {seconds:.0f} s, process {pid} on {host}); "
        "end that process, or use other ports"
    )


class Search:
    """Reports, every few seconds until all links of a task have been up, which tasks it looks for and what it finds."""

    def __init__(
        self,
        keepers: Iterable[PeerKeeper],
        ours: Callable[[], StartFacts],
        say_missing: Callable[[tuple[MissingTask, ...]], None],
        over: Callable[[], bool],
        tasks: int,
    ) -> None:
        """``keepers``: of the peers that this task dials. ``over``: whether the search has ended. ``tasks``: how many
        the whole cluster has."""
        self._keepers = list(keepers)
        self._ours = ours
        self._say_missing = say_missing
        self._over = over
        self._compare_at = time.monotonic() + ask_after(tasks)
        self._compare_every = max(COMPARE_SECONDS, ask_after(tasks))
        self._difference = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="search", daemon=True)

    def start(self) -> None:
        if self._keepers:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(SEARCH_JOIN_SECONDS)

    def _run(self) -> None:
        guard = Guard("the search for other tasks")
        while not self._stop.wait(SEARCH_SECONDS) and not self._over():
            self._keepers = [keeper for keeper in self._keepers if not keeper.linked]
            if not self._keepers:
                return
            guard.passes(lambda: self._say_missing(tuple(self._missing(keeper) for keeper in self._keepers)))

    def _missing(self, keeper: PeerKeeper) -> MissingTask:
        now = time.monotonic()
        finding = keeper.finding
        text = finding.phrase(now - keeper.found_since)
        if finding.description is None and now >= self._compare_at:
            self._compare_at = now + self._compare_every
            self._difference = self._compare(keeper, finding)
        if finding.description is None and self._difference:
            text = f"{text}; {self._difference}"
        return MissingTask(str(keeper.peer), keeper.front, text, now - keeper.since, keeper.attempts)

    def _compare(self, keeper: PeerKeeper, finding: AddressFinding) -> str:
        """Whether the host lists differ: those of the task at the peer's address, or else of any other task."""
        ours = self._ours()
        if finding.reachable:
            theirs = ask_start(keeper.front)
            return difference_with_any(ours, (theirs,)) if theirs is not None else ""
        return difference_with_any(ours, None)
