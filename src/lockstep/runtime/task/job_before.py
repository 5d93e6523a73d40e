"""A server that was restarted looks for the job that it was lost from: there may be none any more.

Where a job can go back to a checkpoint, the others may leave and form it again; that it is over is proven only by what
its coordinator left beside the checkpoints. Where servers have second homes and there is no checkpoint, a job forms
once: after its end nobody comes any more, and their monitors show it.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import INITIAL_STEP, JobId, Role, TaskId
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.timing import ASK_SECONDS
from lockstep.runtime import phrases
from lockstep.runtime.checkpoint.ending import noted_end
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.outcome import Outcome
from lockstep.transports.control.monitor_client import Unreachable, describe
from lockstep.transports.control.tcp_probe import probe

LOOKS = 3
"""So often in a row nobody of the job must be there."""


class JobBefore:
    """Looks into the job's folder, or asks the monitors of all other tasks."""

    def __init__(self, cluster: ClusterSpec, train_dir: str = "", job: JobId = 0) -> None:
        """``job``: the one that the former incarnation was in, which has left its end in ``train_dir``. Without both,
        the monitors are asked."""
        assert cluster.task is not None
        self._task = cluster.task
        everybody = [(TaskId.parse(name), address) for name, address in cluster.all_addresses()]
        self._others = [(task, address) for task, address in everybody if task != self._task]
        self._folder = Path(train_dir) if train_dir and job else None
        self._job = job
        self._nobody = 0
        self._failed = False

    def look(self) -> Outcome | None:
        """How the job ended, once that is certain."""
        ended = self._as_monitors_say() if self._folder is None else noted_end(self._folder, self._job)
        if ended is None:
            return None
        if ended:
            return Outcome(True)
        return Outcome(
            False, str(self._task), INITIAL_STEP, Reason(Cause.DEAD, phrases.came_back_too_late(self._task, ok=False))
        )

    def _as_monitors_say(self) -> bool | None:
        """Whether it ended well, once nobody of it is left. A task that failed is answered for longer than one that did
        not: if nothing shows a failure, there was none."""
        there = [task for task, address in self._others if not self._has_left(task, address)]
        self._nobody = 0 if there else self._nobody + 1
        return None if self._nobody < LOOKS else not self._failed

    def _has_left(self, task: TaskId, address: str) -> bool:
        """Or it is a server that looks for the same job."""
        if (reach := probe(address).reach) is not Reach.OPEN:
            return reach is Reach.REFUSED
        try:
            found = describe(address, ASK_SECONDS)
        except Unreachable:
            return False
        if found.exited and task.role is Role.WORKER:
            self._failed = self._failed or found.exit_code != 0
        return found.exited or (task.role is Role.SERVER and not found.job)
