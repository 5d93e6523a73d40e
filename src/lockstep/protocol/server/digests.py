"""Whether all workers still have the same parameters, where each has its own copy (without servers).

Now and then every worker's seal carries a digest of each bucket of its parameters. Once all are here they are compared:
the workers that differ from most others have drifted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.messages import Seal

STEPS_KEPT = 4
"""A seal may be lost with its link; what waits for it is forgotten."""


@dataclass(frozen=True, slots=True)
class Drift:
    """``task`` has other parameters in ``bucket`` than ``other`` and most workers."""

    task: TaskId
    other: TaskId
    bucket: BucketId


class Digests:
    """What the workers said of their parameters."""

    def __init__(self, workers: tuple[TaskId, ...]) -> None:
        self.buckets: tuple[BucketId, ...] = ()
        """The buckets that each tuple of digests is of."""
        self._workers = workers
        self._said: dict[Step, dict[TaskId, tuple[int, ...]]] = {}

    def note(self, task: TaskId, seal: Seal) -> Drift | None:
        """Keep what a worker said; with the last one of a step, the first difference."""
        if len(seal.digests) != len(self.buckets):
            return None
        said = self._said.setdefault(seal.step, {})
        said[task] = seal.digests
        for old in sorted(self._said)[:-STEPS_KEPT]:
            del self._said[old]
        if len(said) < len(self._workers):
            return None
        self._said.pop(seal.step, None)
        return self._first_difference(said)

    def _first_difference(self, said: dict[TaskId, tuple[int, ...]]) -> Drift | None:
        for place, bucket in enumerate(self.buckets):
            digests = {task: said[task][place] for task in self._workers}
            # Of two that are equally frequent, the first one counts: the chief's.
            usual = Counter(digests.values()).most_common(1)[0][0]
            odd = next((task for task, digest in digests.items() if digest != usual), None)
            if odd is not None:
                other = next(task for task, digest in digests.items() if digest == usual)
                return Drift(odd, other, bucket)
        return None
