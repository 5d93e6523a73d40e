"""How long a step takes on a cluster of this size and network, and how the time splits into parts.

It runs the same machines on a network without faults whose adapters have a rate. Moments that the whole cluster passes
in every step cut the step into parts that add up to it::

    all workers have version s | all gradients are made | all have arrived | all updates done | all have version s+1
                        compute + stragglers       gradients          update           parameters
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lockstep.protocol.core.events import BucketApplied, Event, GradientArrived, Produced, VersionArrived
from lockstep.protocol.core.ids import ClusterShape, Step, TaskId
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import DEFAULT_BUCKET_BYTES, Plan, make_plan
from lockstep.sim.pool import no_collections
from lockstep.sim.scenario import NetworkProfile, Scenario, SecondsRange, TrainingProfile
from lockstep.sim.server_side import SimulatedServer
from lockstep.sim.violation import Rule, Violation
from lockstep.sim.world import World

FORWARD = 1 / 3
"""The share of forward in the computation of a step."""
PARTS = ("compute", "stragglers", "gradients", "update", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityCase:
    """One cluster and what it trains."""

    workers: int
    servers: int
    parameters: tuple[ParameterEntry, ...]
    steps: int = 3
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    bandwidth: float = 25e9 / 8
    """Bytes per second of each host's adapter, in each direction."""
    latency: float = 50e-6
    slow_start: bool = True
    """Whether a connection begins slowly after a pause (``slow_start.py``)."""
    compute: float = 0.3
    """Seconds of forward and backward on one worker."""
    jitter: float = 0.05
    """How much longer the slowest computation takes than the fastest, as a fraction."""
    store_bandwidth: float = 4e9
    loop_seconds: float = 30e-6
    shared_hosts: bool = False
    seed: int = 0

    def plan(self) -> Plan:
        return make_plan(self.parameters, self.servers, self.bucket_bytes)

    def model_bytes(self) -> int:
        return self.plan().arena_bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """The fraction of time that a kind of resource was busy: on average, and the busiest one."""

    mean: float
    most: float


@dataclass(frozen=True, slots=True)
class CapacityMeasurement:
    """The result of one case."""

    case: CapacityCase
    step: float
    parts: dict[str, float]
    busy: dict[str, Busy]
    buckets: int
    model_bytes: int
    events: int

    @property
    def efficiency(self) -> float:
        """The share of a step in which workers compute."""
        return self.case.compute / self.step if self.step else 0.0

    @property
    def bottleneck(self) -> str:
        """The kind of resource whose busiest member is the busiest of all."""
        return max(self.busy, key=lambda name: self.busy[name].most)


def measure(case: CapacityCase) -> CapacityMeasurement:
    """Play a case, and measure its steps after the first."""
    world = World(scenario_of(case))
    plan = case.plan()
    clock = _StepClock(world, case, len(plan.buckets))
    world.watching = clock.saw
    with no_collections():
        result = world.run()
    if not result.ok:
        raise Violation(Rule.BAD_END, f"a cluster without faults did not end well: {result.outcomes}")
    first = 1 if case.steps > 1 else 0
    steps = range(first, case.steps)
    parts = {name: sum(clock.parts(step)[name] for step in steps) / len(steps) for name in PARTS}
    return CapacityMeasurement(
        case=case,
        step=sum(parts.values()),
        parts=parts,
        busy=clock.shares(first, case.steps),
        buckets=len(plan.buckets),
        model_bytes=plan.arena_bytes,
        events=result.events,
    )


def scenario_of(case: CapacityCase) -> Scenario:
    """The scenario, without faults, that plays a case."""
    buckets = max(1, len(case.plan().buckets))
    forward, backward = case.compute * FORWARD, case.compute * (1 - FORWARD) / buckets
    return Scenario(
        seed=case.seed,
        servers=case.servers,
        workers=case.workers,
        parameters=case.parameters,
        bucket_bytes=case.bucket_bytes,
        network=NetworkProfile(
            latency=SecondsRange(case.latency, case.latency),
            torn=False,
            bandwidth=case.bandwidth,
            slow_start=case.slow_start and case.latency > 0,
            shared_hosts=case.shared_hosts,
            quiet_after=0.0,
        ),
        training=TrainingProfile(
            steps=case.steps,
            prepare=SecondsRange(0.0, 0.0),
            # All of the jitter is drawn once per step: a slow worker is slow in its whole forward.
            forward=SecondsRange(forward, forward + case.compute * case.jitter),
            backward=SecondsRange(backward, backward),
            apply=SecondsRange(0.0, 0.0),
            store_bandwidth=case.store_bandwidth,
            loop_seconds=case.loop_seconds,
            in_order=True,
        ),
        start=SecondsRange(0.0, 0.0),
        patience=1e6,
    )


@dataclass(slots=True)
class _Moments:
    """When the cluster passed each moment of one step."""

    had: dict[TaskId, float] = field(default_factory=dict)
    """When each worker had all parameters of the step."""
    produced: dict[TaskId, float] = field(default_factory=dict)
    """When each worker had made its last gradient."""
    arrived: float = 0.0
    applied: float = 0.0


class _StepClock:
    """Records when each moment of each step came, and how busy every resource had been by then."""

    def __init__(self, world: World, case: CapacityCase, buckets: int) -> None:
        self._world = world
        self._expected = case.workers * buckets
        self._moments: dict[Step, _Moments] = {}
        self._missing: dict[int, int] = {}
        self._held: dict[int, float] = {}
        self._busy: dict[int, dict[str, list[float]]] = {}

    def saw(self, name: TaskId, event: Event, now: float) -> None:
        kind = type(event)
        if kind is VersionArrived:
            assert isinstance(event, VersionArrived)
            self._of(event.version).had[name] = now
            left = self._missing.get(event.version, self._expected) - 1
            self._missing[event.version] = left
            if left == 0:
                self._held[event.version] = now
                self._busy[event.version] = self._busy_now()
        elif kind is GradientArrived:
            assert isinstance(event, GradientArrived)
            self._of(event.step).arrived = now
        elif kind is Produced:
            assert isinstance(event, Produced)
            self._of(event.step).produced[name] = now
        elif kind is BucketApplied:
            assert isinstance(event, BucketApplied)
            self._of(event.step).applied = now

    def _of(self, step: Step) -> _Moments:
        moments = self._moments.get(step)
        if moments is None:
            moments = self._moments[step] = _Moments()
        return moments

    def parts(self, step: Step) -> dict[str, float]:
        """The parts of one step; they add up to it."""
        moments, begin, end = self._moments[step], self._held[step], self._held[step + 1]
        last = max(begin, *moments.produced.values())
        own = [made - moments.had[worker] for worker, made in moments.produced.items()]
        # Workers that get their parameters early start early; for the cluster, the step starts with the last of them.
        compute = min(sum(own) / len(own), last - begin)
        arrived = max(moments.arrived, last)
        applied = max(moments.applied, arrived)
        return dict(
            zip(PARTS, (compute, last - begin - compute, arrived - last, applied - arrived, end - applied), strict=True)
        )

    def _busy_now(self) -> dict[str, list[float]]:
        world = self._world
        shape: ClusterShape = world.scenario.shape
        adapters, tasks = world.network.adapters, world.tasks
        servers, workers = shape.server_ids(), shape.worker_ids()
        stores = [world.servers[task] for task in servers]
        return {
            "server adapter in": [adapters[task].into.busy for task in servers],
            "server adapter out": [adapters[task].out.busy for task in servers],
            "worker adapter in": [adapters[task].into.busy for task in workers],
            "worker adapter out": [adapters[task].out.busy for task in workers],
            "server update": [_store(side) for side in stores],
            "server loop": [tasks[task].loop_busy for task in servers],
        }

    def shares(self, first: int, last: int) -> dict[str, Busy]:
        """How busy each kind of resource was from having version ``first`` to having version ``last``."""
        seconds = self._held[last] - self._held[first]
        before, after = self._busy[first], self._busy[last]
        return {name: _busy(zip(before[name], after[name], strict=True), seconds) for name in after}


def _store(side: SimulatedServer) -> float:
    return side.store_busy


def _busy(pairs: Iterable[tuple[float, float]], seconds: float) -> Busy:
    shares = [(after - before) / seconds for before, after in pairs]
    return Busy(sum(shares) / len(shares), max(shares))


# -- how it grows --


def growth_cases(case: CapacityCase) -> dict[str, list[CapacityCase]]:
    """The cases that show how a step grows with each of three things: two further cases per thing."""
    short = replace(case, steps=2)
    workers = [replace(short, workers=count) for count in _distinct(case.workers // 4, case.workers // 2)]
    servers = [replace(short, servers=count) for count in _distinct(case.servers // 2)]
    slower, *faster = (replace(short, bandwidth=case.bandwidth * factor) for factor in (0.5, 2.0, 4.0))
    return {
        "workers": [one for one in workers if one.workers < case.workers] + [case],
        "servers": [
            *(one for one in servers if one.servers < case.servers),
            case,
            replace(short, servers=2 * case.servers),
        ],
        "bandwidth": [slower, case, *faster],
    }


def _distinct(*counts: int) -> list[int]:
    return sorted({max(1, count) for count in counts})


def server_cases(case: CapacityCase, most: int) -> list[CapacityCase]:
    """The cases of a search for the right number of servers: 1, 2, 3, 4, 6, 8, 12, ..."""
    counts = sorted({n for power in range(20) for n in (2**power, 3 * 2**power) if n <= most})
    return [replace(case, steps=2, servers=count) for count in counts]


def enough(measured: Iterable[CapacityMeasurement], share: float) -> CapacityMeasurement | None:
    """The case with the fewest servers that reaches ``share`` of the best throughput."""
    rows = sorted(measured, key=lambda one: one.case.servers)
    if not rows:
        return None
    best = min(one.step for one in rows)
    return next(one for one in rows if best / one.step >= share)
