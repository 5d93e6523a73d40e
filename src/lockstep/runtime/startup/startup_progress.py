"""Which tasks are up, which are missing, and what each one does while a cluster forms: one line that anyone can read.

``Board`` composes the line and is pure; ``StartupProgress`` asks the monitors, in the process whose output people read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.startup.address_finding import AddressFinding, EndMemory, ask_seconds, look
from lockstep.transports.guard import Guard

ASK_EVERY: Final = 1.0
ASK_EVERY_PER_TASK: Final = 0.1
"""Large clusters are asked less often: each question costs both sides a few milliseconds."""
ASKED_AT_ONCE: Final = 4
NAMES_SHOWN: Final = 6
STARTED: Final = frozenset(
    {TaskPhase.WARMING_UP, TaskPhase.TRAINING, TaskPhase.FINISHING, TaskPhase.CUT_OFF, TaskPhase.ENDED}
)
_MISSING: Final = "missing"


class Board:
    """The state of every task, and the line about it."""

    def __init__(self, tasks: tuple[TaskId, ...]) -> None:
        self._tasks = tasks
        self._phases: dict[TaskId, str] = {}
        self._missing: dict[TaskId, tuple[AddressFinding, float]] = {}
        self._ends = {task: EndMemory() for task in tasks}

    def note(self, task: TaskId, finding: AddressFinding, now: float) -> None:
        """Record what was found at the address of a task."""
        finding = self._ends[task].with_end(finding, now)
        found = finding.description
        if found is not None:
            self._phases[task] = TaskPhase.ENDED if found.exited else found.phase
            self._missing.pop(task, None)
            return
        self._phases[task] = _MISSING
        known = self._missing.get(task)
        since = known[1] if known is not None and known[0].answer is finding.answer else now
        self._missing[task] = (finding, since)

    def formed(self, tasks: tuple[TaskId, ...]) -> bool:
        """Each of these tasks has started to train, or has ended."""
        return all(self._phases.get(task) in STARTED for task in tasks)

    def groups(self) -> dict[str, list[TaskId]]:
        """Tasks by what they do, in the order of a start; missing ones come last."""
        order = [phase.value for phase in TaskPhase]
        found: dict[str, list[TaskId]] = {}
        for task in self._tasks:
            found.setdefault(self._phases.get(task, _MISSING), []).append(task)
        return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))

    def line(self, now: float) -> str:
        """``2 of 3 tasks are up; connecting: ps 0, worker 0; missing: worker 1, whose address refuses ...``."""
        groups = self.groups()
        missing = groups.pop(_MISSING, [])
        there = len(self._tasks) - len(missing)
        parts = [f"{there} of {len(self._tasks)} tasks are up"]
        parts += [f"{phase}: {_names(tasks)}" for phase, tasks in groups.items()]
        if missing:
            parts.append(f"{_MISSING}: {self._missing_names(missing, now)}")
        return "; ".join(parts)

    def _missing_names(self, missing: list[TaskId], now: float) -> str:
        if len(missing) > 1 or missing[0] not in self._missing:
            return _names(missing)
        finding, since = self._missing[missing[0]]
        return f"{missing[0].short}, whose address {finding.phrase(now - since)}"


def _names(tasks: list[TaskId]) -> str:
    shown = ", ".join(task.short for task in tasks[:NAMES_SHOWN])
    return shown if len(tasks) <= NAMES_SHOWN else f"{shown} and {len(tasks) - NAMES_SHOWN} more"


class StartupProgress:
    """Asks every monitor repeatedly until the cluster has formed, and shows the line after each round."""

    def __init__(
        self,
        addresses: Mapping[TaskId, str],
        until: tuple[TaskId, ...],
        show: Callable[[str], None],
        over: Callable[[], None],
    ) -> None:
        """``show`` receives each line and ``over`` is called once at the end, both on the watch's thread.

        The watch ends when the tasks of ``until`` have started to train.
        """
        self._addresses = dict(addresses)
        self._until = until
        self._show = show
        self._over = over
        self._board = Board(tuple(addresses))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forming", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the watch; may be called twice."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        every = max(ASK_EVERY, ASK_EVERY_PER_TASK * len(self._addresses))
        guard = Guard("the watch over the start")
        with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="forming") as pool:
            while not self._stop.wait(every):
                guard.passes(partial(self._ask_all, pool))
                if self._board.formed(self._until) or self._stop.is_set():
                    break
                self._show(self._board.line(time.monotonic()))
        self._over()

    def _ask_all(self, pool: ThreadPoolExecutor) -> None:
        tasks = list(self._addresses)
        for task, finding in zip(tasks, pool.map(self._look, tasks), strict=True):
            self._board.note(task, finding, time.monotonic())

    def _look(self, task: TaskId) -> AddressFinding:
        return look(task, self._addresses[task], ask_seconds(len(self._addresses)))
