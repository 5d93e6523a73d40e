"""Kills at every event of a small job with second homes, and at every two events: the exhaustive search.

A run without kills lists its events. Each of them is then a run in which the task that handles it is killed there,
before or after what follows from the event has left; what the task had sent arrives, or is lost with it; servers come
back, or do not. In each of *those* runs every later event is a second kill. A loss that comes while the job says that
it has a replica must not be noticed: every step is made once, and the last numbers are those of the undisturbed run.
Whatever else is lost, everybody who is left is told why the job ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.errors import ProtocolError
from lockstep.protocol.core.ids import BucketId, TaskId
from lockstep.sim.replicas.judged_world import JudgedWorld
from lockstep.sim.replicas.world import Moment
from lockstep.sim.violation import Rule, Violation, with_story

SAVING = RecoveryRules(
    on_worker_loss=LossPolicy.WAIT, server_replicas=1, returns=True, save_steps=1, saves_last=True, rejoin_seconds=300.0
)


class SavingWorld(JudgedWorld):
    """Every version goes into a checkpoint."""

    rules = SAVING


@dataclass(frozen=True, slots=True)
class KillAtEvent:
    """A task is killed while it handles this event."""

    task: TaskId
    event: int
    leaves: bool
    """Whether what follows from the event still leaves."""


@dataclass(frozen=True, slots=True)
class ReplicaScenario:
    """One run."""

    seed: int = 0
    servers: int = 2
    workers: int = 2
    steps: int = 2
    buckets: int = 4
    kills: tuple[KillAtEvent, ...] = ()
    servers_return: bool = True
    last_words: bool = True
    """What a task had sent before it was killed arrives."""
    saves: bool = False

    def world(self) -> JudgedWorld:
        kind = SavingWorld if self.saves else JudgedWorld
        world = kind(self.seed, self.servers, self.workers, self.steps, self.buckets)
        world.kills = {(kill.task, kill.event): kill.leaves for kill in self.kills}
        world.servers_return, world.keeps_last_words = self.servers_return, self.last_words
        return world


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """How a run ended."""

    ok: bool
    moments: tuple[Moment, ...]
    reasons: tuple[str, ...]
    took_over: bool
    """Another server has coordinated."""


@dataclass(slots=True)
class ReplicaTally:
    """How the runs of a search went."""

    runs: int = 0
    events: int = 0
    takeovers: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[ReplicaScenario, Violation]] = field(default_factory=list)

    def add(self, other: ReplicaTally) -> None:
        self.runs += other.runs
        self.events += other.events
        self.takeovers += other.takeovers
        self.endings.update(other.endings)
        self.broken += other.broken


def play(scenario: ReplicaScenario) -> ReplicaRun:
    """Play one run; Violation where it breaks a rule, or ends otherwise than it must."""
    world = scenario.world()
    try:
        world.run()
        return _judged(world, scenario)
    except (AssertionError, KeyError, ProtocolError) as broken:  # KeyError: a store lacks what it is asked for
        raise with_story(broken, world.story()) from broken


def _judged(world: JudgedWorld, scenario: ReplicaScenario) -> ReplicaRun:
    ends = [one.ended for one in world.tasks.values() if one.alive and one.ended is not None and not one.ended.alone]
    ok = all(end.ok for end in ends)
    reasons = tuple(sorted({end.reason.text for end in ends if not end.ok}))
    if not ok:
        world.must(world.may_end, Rule.BAD_END, f"the job had a replica of everything, and ended: {'; '.join(reasons)}")
        is_told = all(not end.ok and end.reason.text for end in ends)
        world.must(is_told, Rule.NOT_TOLD, f"the job has ended, and not everybody knows why: {'; '.join(reasons)}")
        world.judge_return(ends)
    else:
        numbers, saved = undisturbed(replace(scenario, seed=0, kills=()))
        world.must(world.numbers() == numbers, Rule.NOT_REPEATED, "the last numbers are others")
        is_saved = world.checkpoints.get(world.steps) == saved
        world.must(is_saved, Rule.NOT_REPEATED, "the last checkpoint is another one")
    return ReplicaRun(ok, tuple(world.history), reasons, world.judging.took_over)


@cache
def undisturbed(scenario: ReplicaScenario) -> tuple[Mapping[BucketId, int], Mapping[BucketId, int] | None]:
    """The last numbers, and the last checkpoint: they depend on the job, not on the order of events."""
    world = scenario.world()
    world.run()
    return world.numbers(), world.checkpoints.get(world.steps)


def ways(scenario: ReplicaScenario) -> Iterator[ReplicaScenario]:
    """Servers that come back or do not, last words that arrive or do not."""
    for returns, words in product((True, False), repeat=2):
        yield replace(scenario, servers_return=returns, last_words=words)


def search_one(scenario: ReplicaScenario, stride: int = 1) -> ReplicaTally:
    """A kill at every event (at every ``stride``-th)."""
    tally = ReplicaTally()
    for moment in _moments(tally, scenario)[::stride]:
        for leaves in (True, False):
            _note(tally, replace(scenario, kills=(KillAtEvent(*moment, leaves),)))
    return tally


def first_kills(tally: ReplicaTally, scenario: ReplicaScenario) -> list[KillAtEvent]:
    """Of two: what follows from the event leaves if what had been sent arrives."""
    return [KillAtEvent(*moment, scenario.last_words) for moment in _moments(tally, scenario)]


def search_two(scenario: ReplicaScenario, first: KillAtEvent, stride: int = 1) -> ReplicaTally:
    """A second kill at every event (at every ``stride``-th) after ``first``."""
    tally = ReplicaTally()
    once = replace(scenario, kills=(first,))
    moments = _moments(tally, once)
    place = moments.index((first.task, first.event)) if moments else 0
    for moment in moments[place + 1 :: stride]:
        _note(tally, replace(scenario, kills=(first, KillAtEvent(*moment, first.leaves))))
    return tally


def _moments(tally: ReplicaTally, scenario: ReplicaScenario) -> tuple[Moment, ...]:
    """The events of this run; none if it breaks a rule, which the tally then has."""
    try:
        return play(scenario).moments
    except Violation as broken:
        tally.runs += 1
        tally.broken.append((scenario, broken))
        return ()


def _note(tally: ReplicaTally, scenario: ReplicaScenario) -> None:
    tally.runs += 1
    try:
        run = play(scenario)
    except Violation as broken:
        tally.broken.append((scenario, broken))
        return
    tally.events += len(run.moments)
    tally.takeovers += run.took_over
    tally.endings["completed" if run.ok else "; ".join(run.reasons)] += 1
