"""What a job needs of its node, whether servers hold the parameters or every rank trains."""

from __future__ import annotations

from typing import Protocol

from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.watch.status import MainThread


class JobNode(Protocol):
    """One task of a running cluster, as its program sees it."""

    task: TaskId
    main: MainThread
    outcome: Outcome | None
    local_state: bytes

    @property
    def cluster(self) -> ClusterSpec: ...

    @property
    def keeps_state(self) -> bool: ...

    @property
    def saves(self) -> bool:
        """Whether the job writes checkpoints while it runs."""

    def tell_state(self, step: Step, data: bytes, stuck: str = "") -> None: ...

    def phase(self, phase: TaskPhase) -> None: ...

    def raise_if_ended(self) -> None: ...

    def fail(self, reason: Reason) -> Outcome: ...

    def close(self) -> None: ...
