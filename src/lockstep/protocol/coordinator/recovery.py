"""What a job does when a task is lost, and what it keeps for that: the rules, and the workers' local states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, Incarnation, Step, TaskId, worker
from lockstep.protocol.core.messages import LocalState
from lockstep.protocol.core.timing import GRACE_SECONDS, REJOIN_SECONDS


class LossPolicy(StrEnum):
    """What happens to a job that loses a worker, spelled as in ``--on_worker_loss``."""

    WAIT = "wait"
    """The others wait for it to be restarted; it computes the open step again."""
    SHRINK = "shrink"
    """The others continue without it, and take it back between two steps."""
    ABORT = "abort"
    """The job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRules:
    """How one job handles losses and checkpoints."""

    on_worker_loss: LossPolicy = LossPolicy.ABORT
    rejoin_seconds: float = REJOIN_SECONDS
    returns: bool = False
    """A job that loses a task that holds buckets (a server; without servers, any worker) starts again from its newest
    checkpoint; otherwise it ends."""
    save_steps: int = 0
    save_seconds: float = 0.0
    grace_seconds: float = GRACE_SECONDS
    """How long a job that is asked to end may take to finish and save its step."""
    server_replicas: int = 0
    """How many second homes a shard has: with one, the loss of any one server is survived."""
    saves_last: bool = False
    """The last version goes into a checkpoint before the job ends."""
    ranks_return: bool = False
    """Without servers: a rank that is lost comes back into its step (``rank_coordinator.py``)."""

    def of(self, shape: ClusterShape) -> RecoveryRules:
        """The rules as they are for a cluster of this shape. Without servers every worker holds buckets: the loss of
        one is what the loss of a server is elsewhere, unless ranks come back."""
        if shape.servers:
            return self if not self.ranks_return else replace(self, ranks_return=False)
        if self.ranks_return and shape.workers > 1:
            return replace(self, on_worker_loss=LossPolicy.WAIT)
        return replace(self, on_worker_loss=LossPolicy.ABORT, ranks_return=False)

    def survives(self, task: TaskId, shape: ClusterShape) -> bool:
        """Whether the job goes on after the loss of this task."""
        if task in shape.homes:
            return self.returns or bool(self.server_replicas) or self.ranks_return
        return self.takes_back

    @property
    def saves(self) -> bool:
        return bool(self.save_steps or self.save_seconds or self.saves_last)

    @property
    def keeps_states(self) -> bool:
        """Whether workers must send their local state in every step."""
        return self.saves or self.on_worker_loss is not LossPolicy.ABORT

    @property
    def keeps_versions(self) -> bool:
        """Whether a version may still be asked for when every worker has made a step with it: by a worker that comes
        back, a second home, or a checkpoint."""
        return self.keeps_states or self.returns or bool(self.server_replicas)

    @property
    def takes_back(self) -> bool:
        """Whether a lost worker may join the running job again."""
        return self.on_worker_loss is not LossPolicy.ABORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where a job starts: from scratch, or from a checkpoint of version ``start``."""

    start: Step = INITIAL_STEP
    checkpoint: str = ""
    states: Mapping[int, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """The workers' local states before ``start``, by index."""

    def state_of(self, index: int) -> bytes:
        """A worker that is not in the checkpoint starts with the chief's state."""
        return self.states.get(index, self.states.get(0, b""))


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost: which incarnation, since when, and why."""

    incarnation: Incarnation
    since: float
    reason: Reason


class LocalStates:
    """Each worker's local state before the steps that its next incarnation may have to start with."""

    def __init__(self, beginning: Beginning, workers: int) -> None:
        self._known: dict[TaskId, dict[Step, LocalState]] = {worker(index): {} for index in range(workers)}
        if beginning.start > INITIAL_STEP:
            for task, states in self._known.items():
                states[beginning.start] = LocalState(beginning.start, beginning.state_of(task.index))

    def note(self, task: TaskId, state: LocalState) -> bool:
        """Keep it; False if it is marked "same as before" and the state before has not arrived (it is sent again)."""
        states = self._known[task]
        if state.same and state.step - 1 not in states:
            return False
        states[state.step] = states[state.step - 1] if state.same else state
        return True

    def has(self, task: TaskId, step: Step) -> bool:
        return step in self._known[task]

    def of(self, task: TaskId, step: Step) -> bytes:
        """The state of a worker before ``step``; empty: as the model was built."""
        state = self._known[task].get(step)
        return b"" if state is None else state.data

    def stuck_at(self, task: TaskId, step: Step) -> str:
        """Why another incarnation of a worker could not start with ``step``; empty if it could."""
        state = self._known[task].get(step)
        return "" if state is None else state.stuck

    def newest_of(self, task: TaskId) -> bytes:
        """The last known state of a worker that steps were made without."""
        states = self._known[task]
        return states[max(states)].data if states else b""

    def set(self, task: TaskId, step: Step, data: bytes) -> None:
        self._known[task] = {step: LocalState(step, data)}

    def forget_stuck_after(self, task: TaskId, step: Step) -> None:
        """A worker was lost that can start again with ``step`` but not with a later one: nothing may be committed that
        would make ``step`` unavailable. Its next incarnation, or this one if it is alive after all, sends it again."""
        states = self._known[task]
        for known in [one for one, state in states.items() if one > step and state.stuck]:
            del states[known]

    def forget_before(self, step: Step) -> None:
        """Drop all but each worker's newest state: a worker that steps are made without may come back to it."""
        for states in self._known.values():
            for old in [known for known in states if known < step and known != max(states)]:
                del states[old]
