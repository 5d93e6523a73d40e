"""Where a dashboard looks: at a live cluster, or at the files of a run that has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lockstep.dashboard.frame import FrameMaker, Look
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.asking import analysed, cluster_at
from lockstep.diagnose.collect import collect, fetch_stack
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.files import evidence_of, read_folder
from lockstep.diagnose.verdict import Diagnosis
from lockstep.errors import BadInput
from lockstep.protocol.core.timing import WHY_ASK_SECONDS

STACK_SECONDS = 2.0
STACK_EVERY = 5.0


class LookSource(Protocol):
    """Something that can be looked at again and again."""

    lives: bool
    """Whether the next look may find something else."""

    def maker(self) -> FrameMaker:
        """What makes frames of its looks."""

    def look(self) -> Look:
        """What is there now; takes a bounded time, whoever does not answer."""


class LiveCluster:
    """All tasks of the cluster that one task belongs to."""

    lives = True

    def __init__(self, address: str, asker: str) -> None:
        self._address = address
        self._asker = asker
        self._cluster = cluster_at(address)
        self._stack: tuple[str, ...] = ()
        self._stack_of = ("", "")
        self._stack_at = -STACK_EVERY

    def maker(self) -> FrameMaker:
        return FrameMaker("live", self._address)

    def look(self) -> Look:
        now = time.monotonic()
        found = collect(self._cluster, WHY_ASK_SECONDS, together=True)
        # A monitor on a busy host may not have told of the others at first.
        for seen in found.values():
            for known in (seen.monitor, seen.view):
                for task, address in known.cluster.items() if known is not None else ():
                    self._cluster.setdefault(task, address)
        diagnosis = self._with_stack(analysed(found, self._asker), found)
        return Look(found, diagnosis, now, time.time())

    def _with_stack(self, diagnosis: Diagnosis, found: Mapping[str, Seen]) -> Diagnosis:
        """The stack of a culprit that does not answer, from its monitor: once, since taking it costs the host; again
        after a while if a busy host gave none."""
        verdict = diagnosis.verdict
        seen = None if verdict is None else found.get(verdict.culprit)
        if verdict is None or seen is None or seen.view is not None or seen.monitor is None or seen.monitor.exited:
            return diagnosis
        about = (verdict.culprit, seen.monitor.incarnation)
        now = time.monotonic()
        if self._stack_of != about or (not self._stack and now - self._stack_at >= STACK_EVERY):
            self._stack_of, self._stack_at = about, now
            self._stack = fetch_stack(seen.address, STACK_SECONDS)
        return replace(diagnosis, verdict=replace(verdict, stack=self._stack or verdict.stack))


class RunFolderFiles:
    """What the tasks of a run have left in its folder."""

    lives = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = read_folder(path)
        if self._folder.report is None and not self._folder.views:
            raise BadInput(
                f"{path} has no readable report or snapshot of a run; give the folder that the job named at its end, "
                "or, for the dumps of torch's flight recorder, ask 'lockstep why' about it."
            )
        self.problems = tuple(self._folder.problems)

    def maker(self) -> FrameMaker:
        return FrameMaker("files", str(self._path))

    def look(self) -> Look:
        evidence = evidence_of(self._folder)
        diagnosis = self._folder.report or analyse(evidence)
        written = diagnosis.time or self._folder.newest
        return Look(evidence.tasks, diagnosis, time.monotonic(), written)
