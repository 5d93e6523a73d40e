"""What one task is configured with, once, before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.core.faults import Fault
from lockstep.protocol.core.ids import JobId, TaskId
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.end_guard import GiveUp
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.version import __version__


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
