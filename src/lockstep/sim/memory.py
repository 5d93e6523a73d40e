"""A model of the bytes: every buffer is two halves, and each half holds a tag that names the origin of its bytes.

Transfers read and land one half at a time, so that a reader of a buffer that is being written sees two
different tags, as it would see torn bytes. Nothing is computed; only origins are tracked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.protocol.core.ids import BucketId, Incarnation, Step, TaskId
from lockstep.sim.violation import Rule, Violation


@dataclass(frozen=True, slots=True)
class GradientTag:
    """Bytes of one gradient bucket: whose, of which incarnation, step and edition."""

    worker: TaskId
    incarnation: Incarnation
    step: Step
    bucket: BucketId
    edition: int
    number: int = 0
    """What was computed, if the run tracks numbers (``numbers.py``)."""


@dataclass(frozen=True, slots=True)
class VersionTag:
    """Bytes of one parameter bucket. ``serial`` counts the updates; with synchronous steps it is the version."""

    bucket: BucketId
    serial: int
    made_of: tuple[GradientTag, ...]
    number: int = 0


Tag = GradientTag | VersionTag
Halves = tuple[Tag | None, Tag | None]


@dataclass(slots=True)
class Cell:
    """One buffer."""

    place: tuple[str, TaskId, BucketId, int, TaskId | None]
    """What it is, its owner, its bucket, its part or incarnation, and whose bytes it holds."""
    halves: list[Tag | None] = field(default_factory=lambda: [None, None])
    readers: int = 0
    """Readers that must not see a change. A transfer whose source may change is not one of them."""

    @property
    def name(self) -> str:
        what, owner, bucket, part, of = self.place
        if what == "slot":
            return f"slot {part} of bucket {bucket} on {owner.short}"
        if of is not None:
            return f"the inbox of {owner.short} for bucket {bucket} of {of.short} of incarnation {part:x}"
        return f"{what} bucket {bucket} of {owner.short}"

    def write(self, half: int, tag: Tag | None) -> None:
        """Overwrite one half, which must not be read at the time."""
        if self.readers and self.halves[half] != tag:
            raise Violation(
                Rule.OVERWRITTEN, f"{self.name} is overwritten with {tag} while {self.halves[half]} is being read"
            )
        self.halves[half] = tag

    def whole(self) -> Tag | None:
        """The tag of both halves, or None if they differ."""
        return self.halves[0] if self.halves[0] == self.halves[1] else None

    def expect(self, tag: Tag | None, who: str) -> None:
        """``who`` reads it now and must see exactly ``tag``."""
        if self.halves[0] != tag or self.halves[1] != tag:
            raise Violation(
                Rule.WRONG_BYTES,
                f"{who} reads {self.name}: expected {tag}, found {self.halves[0]} and {self.halves[1]}",
            )


class SimulatedMemory:
    """All buffers of a cluster."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, TaskId, int, int, TaskId | None], Cell] = {}

    def _cell(self, what: str, owner: TaskId, bucket: BucketId, part: int = 0, of: TaskId | None = None) -> Cell:
        key = (what, owner, bucket, part, of)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(key)
        return cell

    def parameters(self, worker: TaskId, bucket: BucketId) -> Cell:
        """A bucket in a worker's parameter arena."""
        return self._cell("parameter", worker, bucket)

    def gradients(self, worker: TaskId, bucket: BucketId) -> Cell:
        """A bucket in a worker's gradient arena."""
        return self._cell("gradient", worker, bucket)

    def inbox(self, server: TaskId, worker: TaskId, life: Incarnation, bucket: BucketId) -> Cell:
        """Where a server receives this bucket of one incarnation of a worker."""
        return self._cell("inbox", server, bucket, life, worker)

    def slot(self, server: TaskId, bucket: BucketId, slot: int) -> Cell:
        """One of the copies of a bucket in a server's store: one or two."""
        return self._cell("slot", server, bucket, slot)

    def forget(self, task: TaskId) -> None:
        """The memory of a process ends with it."""
        for key in [key for key in self._cells if key[1] == task]:
            del self._cells[key]
