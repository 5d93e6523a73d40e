"""What a simulated run is: the cluster, the network, the training loop and the faults, all as plain data.

The same scenario gives the same run, event for event: every draw comes from one ``random.Random(seed)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.ids import ClusterShape, TaskId
from lockstep.protocol.core.messages import ParameterEntry, Setting


class Mode(StrEnum):
    """How gradients become versions."""

    EAGER = "eager"
    """A bucket is applied once all its gradients are here."""
    SEALED = "sealed"
    """A bucket is applied once every worker has sealed the step; until then it may be edited and sent again."""
    ASYNC = "async"
    """Each worker's gradient is applied by itself."""
    ASYNC_SEALED = "async, sealed"
    """Each worker's gradient is applied by itself, once that worker has sealed it."""

    @property
    def seals(self) -> bool:
        return self in (Mode.SEALED, Mode.ASYNC_SEALED)

    @property
    def synchronous(self) -> bool:
        return self in (Mode.EAGER, Mode.SEALED)


@dataclass(frozen=True, slots=True)
class SecondsRange:
    """A time drawn uniformly between two bounds, in seconds."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProfile:
    """How links behave until ``quiet_after``; after that, nothing is late, doubled, refused or lost."""

    latency: SecondsRange = SecondsRange(0.0001, 0.01)
    late_chance: float = 0.0
    late: SecondsRange = SecondsRange(1.0, 15.0)
    """Some messages and transfers are this late instead: longer than the machines' patience."""
    in_order: bool = True
    """Messages of one direction of a link keep their order, as streams do."""
    duplicate_chance: float = 0.0
    """A message, or the note of a transfer, arrives twice."""
    reset_chance: float = 0.0
    """A link breaks at a message or transfer, loses what is in flight, and is reopened."""
    max_resets: int = 8
    reopen: SecondsRange = SecondsRange(0.01, 3.0)
    transfer_failure_chance: float = 0.0
    """A transfer fails while its link stays up."""
    ghost_chance: float = 0.0
    """Along with a gradient, one of a former incarnation of its sender arrives."""
    lent_in_place: bool = False
    """Gradients are read in the worker's own memory, as over shared memory; otherwise they are copied."""
    torn: bool = True
    """Bytes are read and land in two halves, at different moments."""
    bandwidth: float = 0.0
    """Bytes per second of every host's adapter, in each direction; 0: unlimited."""
    slow_start: bool = False
    """Connections begin slowly after a pause, as TCP does (``slow_start.py``)."""
    shared_hosts: bool = False
    """Server *i* shares the host, and the adapter, of worker *i*."""
    quiet_after: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProfile:
    """What the training loop of each worker does."""

    steps: int = 3
    prepare: SecondsRange = SecondsRange(0.0, 0.5)
    """From membership to a model and its memory; also how long a server takes to allocate its memory."""
    forward: SecondsRange = SecondsRange(0.001, 0.05)
    backward: SecondsRange = SecondsRange(0.0, 0.02)
    """From one filled bucket to the next."""
    apply: SecondsRange = SecondsRange(0.0, 0.02)
    """One update, whatever its size; a server makes its updates one after another."""
    store_bandwidth: float = 0.0
    """Bytes per second at which a server reads gradients and writes parameters, on top of ``apply``; 0: unlimited."""
    loop_seconds: float = 0.0
    """What one event costs the loop of a task; the next one waits for it."""
    in_order: bool = False
    """Backward fills the buckets in the order of the plan; otherwise in a random order."""
    absent_chance: float = 0.0
    """A bucket gets no gradient in a step."""
    edit_chance: float = 0.0
    """A bucket is edited after backward (only with seals)."""
    withdraw_chance: float = 0.0
    """A bucket's gradient is taken back before the seal (only with seals)."""
    void_chance: float = 0.0
    """A worker finds infinity in its gradients, so the whole step must not be applied (only with seals)."""
    clip_chance: float = 0.0
    """All workers clip the mean of a step by its norm (only with seals, with servers, of all workers)."""
    seals_early: bool = False
    """Some buckets follow the seal, all in their first edition (only with seals, with servers, of all workers)."""
    rates_at_seal: bool = False
    """The chief sends the rates with its seal instead of at the start of the step."""
    calls: bool = False
    """Programs make calls: before their first step, in each step and, if they seal it, after it."""
    save: SecondsRange = SecondsRange(0.001, 0.05)
    """How long writing a shard or a checkpoint takes."""

    @property
    def repeatable(self) -> bool:
        """Whether a step that is computed again has the same gradients."""
        return not (self.absent_chance or self.edit_chance or self.withdraw_chance or self.void_chance)


@dataclass(frozen=True, slots=True)
class Mishap:
    """One thing that went wrong on the way from ``task`` to ``peer``: at the ``number``-th chance for it there."""

    kind: str
    """``late``, ``doubled``, ``reset``, ``failed`` or ``ghost``; see ``network_faults.py``."""
    task: str
    peer: str
    number: int
    seconds: float = 0.0
    """How late, if it is."""

    def to_text(self) -> str:
        """``late,worker 1,ps 0,17,8.2``, for a command line."""
        return ",".join(
            [self.kind, self.task, self.peer, str(self.number), *([f"{self.seconds:g}"] * (self.seconds > 0))]
        )

    @classmethod
    def parse(cls, text: str) -> Mishap:
        """Read the printed form back; ValueError for anything else."""
        parts = text.split(",")
        try:
            kind, task, peer, number, seconds = parts if len(parts) == 5 else (*parts, "0")
            return cls(kind, task, peer, int(number), float(seconds))
        except ValueError:
            raise ValueError(f"{text!r} is not a mishap like 'late,worker 1,ps 0,17,8.2'") from None


@dataclass(frozen=True, slots=True)
class Kill:
    """A task is killed at this time."""

    task: TaskId
    at: float


def default_parameters() -> tuple[ParameterEntry, ...]:
    """Three small parameters, one of them cut into two buckets of 64 bytes, one of them empty."""
    return (
        ParameterEntry("first.weight", 24, "float32", 0),
        ParameterEntry("first.empty", 0, "float32", 0),
        ParameterEntry("second.weight", 7, "float32", 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run."""

    seed: int
    servers: int = 1
    workers: int = 2
    mode: Mode = Mode.EAGER
    aggregate: int | None = None
    """With backup workers: how many make a step (only if steps are synchronous and sealed)."""
    parameters: tuple[ParameterEntry, ...] = field(default_factory=default_parameters)
    bucket_bytes: int = 64
    network: NetworkProfile = NetworkProfile()
    training: TrainingProfile = TrainingProfile()
    start: SecondsRange = SecondsRange(0.0, 1.0)
    """When each task starts."""
    startup_timeout: float = 300.0
    kills: tuple[Kill, ...] = ()
    mishaps: tuple[Mishap, ...] | None = None
    """Exactly what goes wrong on the network; None: drawn, with the chances of ``network``."""
    late_starts: tuple[tuple[TaskId, float], ...] = ()
    """Tasks that start late, and by how many seconds."""
    stall_after: float = 60.0
    """After this long without progress the job is ended with a verdict."""
    user_code_timeout: float = 100.0
    """The same where user code is the cause; shorter than a real job's, so that it is within ``patience``."""
    absentees: tuple[TaskId, ...] = ()
    """Tasks that never start."""
    odd_settings: tuple[tuple[TaskId, Setting], ...] = ()
    """Tasks that were started with a different setting than the rest."""
    odd_steps: tuple[tuple[TaskId, int], ...] = ()
    """Workers that run a different number of steps than the rest."""
    odd_models: tuple[TaskId, ...] = ()
    """Workers whose first parameter is larger than the others'."""
    patience: float = 200.0
    """Once the network is quiet, the run must end within this many virtual seconds."""
    rules: RecoveryRules = field(default_factory=RecoveryRules)
    """How the job handles lost tasks, and what it saves."""
    restart: SecondsRange = SecondsRange(0.2, 3.0)
    """How long after its end the next incarnation of a task starts, in a run that recovers."""

    def __post_init__(self) -> None:
        if not self.servers and (not self.mode.synchronous or self.aggregate is not None or self.rules.takes_back):
            raise ValueError("without servers steps are synchronous, of all workers, and none comes back into its step")
        if self.training.calls and self.aggregate is not None:
            raise ValueError("a worker that steps may be made without does not come to the calls in them")
        plain = self.mode.synchronous and self.aggregate is None and self.training.repeatable
        if self.recovers and not plain:
            raise ValueError("a run that recovers needs synchronous steps of all workers that can be computed again")

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(self.servers, self.workers)

    @property
    def recovers(self) -> bool:
        """Whether lost tasks are restarted and the job continues."""
        return self.rules.takes_back or self.rules.returns

    @property
    def overwrites(self) -> bool:
        """Whether servers write each version over the one before."""
        common = self.mode.synchronous and self.aggregate is None
        return bool(self.servers) and self.mode.seals and common and not self.rules.keeps_versions

    @property
    def shrinks(self) -> bool:
        """Whether the job continues without a lost worker: then its numbers depend on which worker was lost when."""
        return self.rules.on_worker_loss is LossPolicy.SHRINK
