"""What a drill is: a fault in a task or around it, and what must be reported about it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lockstep.errors import EXIT_FAILED, EXIT_VERDICT, BadInput
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.endings import CANNOT_HEAL
from lockstep.protocol.core.faults import Fault, HitReaders, Raise
from lockstep.protocol.core.ids import server, worker

STEP = 25
"""The step in which most faults strike: by then it is known how long a step takes."""

START_SECONDS_PER_TASK = 2.0
"""On a few cores the tasks of a large cluster start one after the other."""

PS0, PS1, W0, W1 = str(server(0)), str(server(1)), str(worker(0)), str(worker(1))

GRADIENT, PARAMETER = "gradient/bucket_", "parameter/bucket_"
"""The beginnings of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What goes wrong around the tasks, rather than in them."""

    missing: tuple[str, ...] = ()
    """Tasks that are never started."""
    late: tuple[tuple[str, float], ...] = ()
    """Tasks that start to answer this many seconds late."""
    swapped: tuple[tuple[str, str], ...] = ()
    """Two tasks that were started with each other's index."""
    twice: str = ""
    """A task that is started a second time, at another port."""
    restarted: str = ""
    """A task whose monitor is killed in mid-run, and which is restarted at once."""
    leftover: bool = False
    """The server of an older job still holds its port; the workers of the new job find it there."""
    environment: tuple[tuple[str, str], ...] = ()
    cut: tuple[str, str, str] | None = None
    """Two tasks on separate hosts between which packets are dropped: both, from (of the first), slow (what exceeds a
    low rate), large (what exceeds a size); or, with reset, connections are reset."""
    paused: tuple[str, ...] = ()
    """Tasks whose hosts are paused: they, their monitors and all their helpers are stopped."""
    heals_after: float = 0.0
    """The cut, or the pause, ends after this many seconds; 0: only once it was reported."""
    full_log: tuple[str, ...] = ()
    """Tasks that can write neither stdout nor stderr: the disk under their log is full."""
    order: tuple[str, ...] = ()
    """Start in this order, a second apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One fault and what is expected. ``kind``: verdict, notice, or healthy (nothing may be reported)."""

    name: str
    group: str
    story: str
    faults: tuple[Fault, ...] = ()
    around: Surroundings = Surroundings()
    servers: int = 1
    workers: int = 2
    kind: ReportKind | None = ReportKind.VERDICT
    """What must be reported; None: nothing."""
    cause: Cause = Cause.UNKNOWN
    or_cause: Cause | None = None
    """Another cause that is equally right, depending on which of two things happens first."""
    pair: tuple[str, ...] = ()
    """The tasks of which the report must name at least the first as culprit or peer."""
    key: str = ""
    """What the key must contain."""
    one_answer: bool = False
    """All verdicts are the same: the first of the pair is the culprit, the second its peer."""
    step: int = -2
    stall_after: float = 60.0
    user_code_timeout: float = 600.0
    ends_after: float | None = None
    """The job ends this many seconds after the fault struck, and no sooner. None: it ends at once, or need not end."""
    goes_on: bool = False
    """After the report the fault ends, and the job goes on to its end: exit code 0 on every task."""
    fooled: bool = False
    """A tester had fooled us with it: it was reported wrongly, late or not at all when it was first tried."""
    startup_timeout: float = 60.0
    steps: int = 4000
    step_seconds: float = 0.02
    readers: int = 0
    """How many processes read the data of each worker; 0: it has none."""
    elements: int = 256
    bucket_bytes: int = 1024

    def sized(self, servers: int, workers: int) -> Drill:
        """The same in a larger cluster, which takes longer to start; 0: as many as it is made for."""
        servers, workers = servers or self.servers, workers or self.workers
        if servers < self.servers or workers < self.workers:
            raise BadInput(f"the drill {self.name!r} needs at least --ps={self.servers} and --workers={self.workers}.")
        more = servers + workers - self.servers - self.workers
        patience = self.startup_timeout + START_SECONDS_PER_TASK * more
        return dataclasses.replace(self, servers=servers, workers=workers, startup_timeout=patience)

    def is_right(self, cause: str) -> bool:
        """Whether this is the expected cause."""
        return cause == self.cause.value or (self.or_cause is not None and cause == self.or_cause.value)

    @property
    def ends_with(self) -> int | None:
        """The exit code of the tasks that were not struck; None where the job need not end, or never began."""
        if self.ends_after is not None:
            return EXIT_VERDICT
        if self.kind is not ReportKind.VERDICT or self.cause not in CANNOT_HEAL or not self.faults:
            return None
        own = all(isinstance(fault, Raise | HitReaders) for fault in self.faults)
        return EXIT_FAILED if own else EXIT_VERDICT

    @property
    def proof_takes(self) -> float:
        """Seconds before which a verdict proves nothing: a task that comes late is no fault."""
        return self.startup_timeout if self.cause is Cause.NEVER_STARTED else 0.0

    @property
    def needs_hosts(self) -> bool:
        return self.around.cut is not None
