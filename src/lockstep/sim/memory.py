"""A model of the bytes: every buffer is two halves, and each half holds a tag that says whose bytes these are.

Transfers read and land one half at a time, so that whoever reads a buffer while another one writes it sees two
different tags, as it would see torn bytes. Nothing is computed; only origins are followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.protocol.ids import BucketId, Incarnation, Step, TaskId


class Violation(AssertionError):  # noqa: N818 - it is a finding about a run, not an error of the caller
    """A rule of the protocol was broken in a run; the text says which, where and when."""


@dataclass(frozen=True, slots=True)
class GradientTag:
    """Bytes of one gradient bucket: whose, of which life, step and edition."""

    worker: TaskId
    incarnation: Incarnation
    step: Step
    bucket: BucketId
    edition: int


@dataclass(frozen=True, slots=True)
class VersionTag:
    """Bytes of one parameter bucket. ``serial`` counts the updates; with synchronous steps it is the version."""

    bucket: BucketId
    serial: int
    made_of: tuple[GradientTag, ...]


Tag = GradientTag | VersionTag
Halves = tuple[Tag | None, Tag | None]


@dataclass(slots=True)
class Cell:
    """One buffer."""

    name: str
    halves: list[Tag | None] = field(default_factory=lambda: [None, None])
    readers: int = 0
    """Readers that must not see a change. A transfer whose source may change is not one of them."""

    def write(self, half: int, tag: Tag | None) -> None:
        """Overwrite one half; what somebody reads must stay as it is."""
        if self.readers and self.halves[half] != tag:
            raise Violation(f"{self.name} is overwritten with {tag} while somebody reads {self.halves[half]}")
        self.halves[half] = tag

    def whole(self) -> Tag | None:
        """The tag of both halves, or None where they differ."""
        return self.halves[0] if self.halves[0] == self.halves[1] else None

    def expect(self, tag: Tag | None, who: str) -> None:
        """``who`` reads it now and must see exactly ``tag``."""
        if self.halves[0] != tag or self.halves[1] != tag:
            raise Violation(f"{who} reads {self.name}: expected {tag}, found {self.halves[0]} and {self.halves[1]}")


class Memory:
    """All buffers of a cluster."""

    def __init__(self) -> None:
        self._cells: dict[str, Cell] = {}

    def _cell(self, name: str) -> Cell:
        return self._cells.setdefault(name, Cell(name))

    def parameters(self, worker: TaskId, bucket: BucketId) -> Cell:
        """A bucket in a worker's parameter arena."""
        return self._cell(f"parameter bucket {bucket} of {worker.short}")

    def gradients(self, worker: TaskId, bucket: BucketId) -> Cell:
        """A bucket in a worker's gradient arena."""
        return self._cell(f"gradient bucket {bucket} of {worker.short}")

    def inbox(self, server: TaskId, worker: TaskId, life: Incarnation, bucket: BucketId) -> Cell:
        """Where a server takes this bucket of one life of a worker."""
        return self._cell(f"the inbox of {server.short} for bucket {bucket} of {worker.short} in life {life:x}")

    def slot(self, server: TaskId, bucket: BucketId, slot: int) -> Cell:
        """One of the two copies of a bucket in a server's store."""
        return self._cell(f"slot {slot} of bucket {bucket} on {server.short}")
