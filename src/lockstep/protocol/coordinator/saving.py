"""When a checkpoint is due, and how far the one that is being written has come.

A version is saved on every server after the step before is committed and before anything is applied to it, so all
shards of a checkpoint are of one version. Writing continues alongside training, one checkpoint at a time.
"""

from __future__ import annotations

from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.effects import WriteCheckpoint
from lockstep.protocol.core.ids import INITIAL_STEP, TaskId
from lockstep.protocol.core.messages import Saved
from lockstep.protocol.core.timing import REPEAT_SECONDS, SAVE_AGAIN_SECONDS

States = tuple[tuple[int, bytes], ...]


class Saving:
    """The coordinator's record of checkpoints."""

    def __init__(self, rules: RecoveryRules, savers: tuple[TaskId, ...], start: int, now: float) -> None:
        self._rules = rules
        self._savers = savers
        self._savers_since = 0
        """The first view in which these servers hold the shards."""
        self.version: int | None = None
        """The version that is being saved."""
        self.last: int = start if start > INITIAL_STEP else INITIAL_STEP
        """The newest version that is in a checkpoint."""
        self._last_at = now
        self._owed_at: float | None = None
        self._shards: dict[TaskId, Saved] = {}
        self._states: States = ()
        self._since = now
        self.repeat_at: float | None = None

    def is_due(self, version: int, now: float, *, possible: bool = True) -> bool:
        """Whether ``version``, whose step is being committed, is to be saved. ``possible``: a job could start from it;
        otherwise a later version is saved."""
        by_steps = bool(self._rules.save_steps) and version > 0 and version % self._rules.save_steps == 0
        by_time = bool(self._rules.save_seconds) and now - self._last_at >= self._rules.save_seconds
        owed = self._owed_at is not None and now >= self._owed_at
        if not (by_steps or by_time or owed):
            return False
        if self.version is not None or not possible:
            self._owed_at = now  # the previous one is still being written; the next version is saved instead
            return False
        return True

    def change_savers(self, savers: tuple[TaskId, ...], view: int, now: float) -> bool:
        """Other servers hold the shards from this view on. What the former ones have begun to save is not a whole
        checkpoint; if there is such a thing, another version is owed."""
        if savers == self._savers:
            return False
        self._savers, self._savers_since = savers, view
        if self.version is None:
            return False
        self.version, self._states, self.repeat_at = None, (), None
        self.owe(now)
        return True

    def owe(self, now: float) -> None:
        """Save the next version that is committed, no matter when the last one was saved."""
        self._owed_at = now

    def begin(self, version: int, states: States, now: float) -> None:
        self.version, self._states, self._shards = version, states, {}
        self._owed_at, self._last_at, self._since = None, now, now
        self.repeat_at = now + REPEAT_SECONDS

    def lacks(self, task: TaskId) -> bool:
        """Whether this task has not yet reported that its shard is on disk."""
        return self.version is not None and task in self._savers and task not in self._shards

    def missing(self) -> tuple[TaskId, ...]:
        return tuple(task for task in self._savers if self.lacks(task))

    @property
    def since(self) -> float:
        return self._since

    def on_saved(self, task: TaskId, saved: Saved, now: float) -> WriteCheckpoint | None:
        """A shard is on disk. With the last one the checkpoint can be made, or a failed one be cleared away."""
        if saved.version != self.version or task not in self._savers or task in self._shards:
            return None
        if saved.view < self._savers_since:
            return None  # of the buckets that were its own before
        self._shards[task] = saved
        if self.missing():
            return None
        self.repeat_at = None
        self._since = now
        return WriteCheckpoint(saved.version, tuple(self._shards[task] for task in self._savers), self._states)

    def on_written(self, version: int, problem: str, now: float) -> None:
        if version != self.version:
            return
        self.version, self._states, self.repeat_at = None, (), None
        if problem:
            self._owed_at = now + SAVE_AGAIN_SECONDS
        else:
            self.last = version
