"""A bounded ring of what happened, with its cause: always on, cheap, formatted only when read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from types import MappingProxyType

from lockstep.protocol.core.ids import BucketId, Role, Step, TaskId


class Happening(StrEnum):
    """What a record reports. The first six are the states of a tensor, in order."""

    REQUESTED = "requested"
    REQUEST_SEEN = "request seen"
    PRODUCED = "produced"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"
    CONSUMED = "consumed"
    SENT = "sent"
    DROPPED = "dropped"
    SEALED = "sealed"
    OPENED = "opened"
    COMMITTED = "committed"
    JOINED = "joined"
    VIEW = "view"
    LINK_UP = "link up"
    LINK_LOST = "link lost"
    REPEATED = "repeated"
    LOST = "lost"
    CALL_MADE = "call made"
    CALL_COMPLETE = "call complete"
    ENDED = "ended"


Row = tuple[float, Happening, Step, BucketId, TaskId | None, str, bool]


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the journal, named."""

    at: float
    happening: Happening
    step: Step
    bucket: BucketId
    peer: TaskId | None
    cause: str
    share: bool = False
    """Of a worker's share (without servers): what a server would record, such as gradients that arrive."""


PROGRESS = frozenset(
    {
        Happening.PRODUCED,
        Happening.IN_FLIGHT,
        Happening.ARRIVED,
        Happening.CONSUMED,
        Happening.SENT,
        Happening.SEALED,
        Happening.COMMITTED,
        Happening.JOINED,
        Happening.VIEW,
        Happening.CALL_MADE,
        Happening.CALL_COMPLETE,
    }
)
"""Progress of the job. Repeated requests, refusals, and links that come and go are not progress."""

NO_BUCKET: BucketId = -1
NO_STEP: Step = -2
DEFAULT_CAPACITY = 20_000


class Journal:
    """The last ``capacity`` events of one task."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._rows: deque[Row] = deque(maxlen=capacity)
        self.total = 0

    def record(
        self,
        now: float,
        happening: Happening,
        step: Step = NO_STEP,
        bucket: BucketId = NO_BUCKET,
        peer: TaskId | None = None,
        cause: str = "",
    ) -> None:
        """Append one event; the oldest is dropped when the ring is full."""
        self.append((now, happening, step, bucket, peer, cause, False))

    def append(self, row: Row) -> None:
        self.total += 1
        self._rows.append(row)

    def of_share(self) -> Journal:
        """This journal as a worker's share writes to it."""
        return _ShareJournal(self)

    def __iter__(self) -> Iterator[Record]:
        # A copy first: the loop's thread may append while another thread reads.
        return (Record(*row) for row in list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def since(self, number: int) -> tuple[list[Row], int]:
        """The rows after the first ``number`` that are still kept, and how many rows there have been."""
        while True:
            total = self.total
            newest = reversed(self._rows)
            try:
                newest_first = list(islice(newest, max(0, total - number)))
            except RuntimeError:
                continue  # the loop's thread has appended a row since the line above: read again
            newest_first.reverse()
            return newest_first, total

    @staticmethod
    def newest_progress(rows: Sequence[Row]) -> Record | None:
        """The newest row that is progress."""
        return next((Record(*row) for row in reversed(rows) if row[1] in PROGRESS), None)


class _ShareJournal(Journal):
    """Marks what it passes on: both roles of a task have tensors of the same steps under way with the same peers."""

    def __init__(self, whole: Journal) -> None:
        super().__init__(0)
        self._whole = whole

    def record(
        self,
        now: float,
        happening: Happening,
        step: Step = NO_STEP,
        bucket: BucketId = NO_BUCKET,
        peer: TaskId | None = None,
        cause: str = "",
    ) -> None:
        self._whole.append((now, happening, step, bucket, peer, cause, True))

    def of_share(self) -> Journal:
        return self


@dataclass(slots=True)
class TensorStates:
    """What one task has seen of one tensor: each state, when it last occurred, and how often."""

    kind: str
    """``gradient`` or ``parameter``."""
    number: int
    """The step of a gradient, the version of a parameter."""
    bucket: BucketId
    """``NO_BUCKET``: it applies to all buckets of this peer (a request names the step, not each bucket)."""
    peer: TaskId | None
    times: dict[Happening, float] = field(default_factory=dict)
    counts: dict[Happening, int] = field(default_factory=dict)
    cause: str = ""


_OF_GRADIENTS: Mapping[Role, tuple[Happening, ...]] = MappingProxyType(
    {
        Role.WORKER: (
            Happening.REQUEST_SEEN,
            Happening.PRODUCED,
            Happening.IN_FLIGHT,
            Happening.SENT,
            Happening.REPEATED,
        ),
        Role.SERVER: (Happening.OPENED, Happening.ARRIVED, Happening.CONSUMED, Happening.REPEATED),
    }
)
_OF_PARAMETERS: Mapping[Role, tuple[Happening, ...]] = MappingProxyType(
    {
        Role.WORKER: (Happening.REQUESTED, Happening.ARRIVED),
        Role.SERVER: (Happening.REQUEST_SEEN, Happening.PRODUCED, Happening.IN_FLIGHT, Happening.SENT),
    }
)
_NAMED: Mapping[Happening, Happening] = MappingProxyType({Happening.OPENED: Happening.REQUESTED})
"""A server that opens a step asks for its gradients."""


def tensor_states(records: Iterable[Record], role: Role, first: Step, limit: int) -> list[TensorStates]:
    """What happened to each tensor from step ``first`` on, for the newest ``limit`` tensors."""
    found: dict[tuple[str, int, BucketId, TaskId | None], TensorStates] = {}
    for record in records:
        acting = Role.SERVER if record.share else role
        gradient = record.happening in _OF_GRADIENTS[acting]
        parameter = record.happening in _OF_PARAMETERS[acting]
        if not (gradient or parameter) or record.step < (first if gradient else first + 1):
            continue
        kind = "gradient" if gradient else "parameter"
        key = (kind, record.step, record.bucket, record.peer)
        states = found.setdefault(key, TensorStates(kind, record.step, record.bucket, record.peer))
        happening = _NAMED.get(record.happening, record.happening)
        states.times[happening] = record.at
        states.counts[happening] = states.counts.get(happening, 0) + 1
        states.cause = record.cause or states.cause
    return list(found.values())[-limit:]
