"""Harm at every event of a run, and at every pair of events: the exhaustive search over a job with second homes.

A run without harm lists its events (``moments``). Each of them is then a run in which the task that handles it is
killed there, before or after what follows from the event has left; and in each of *those* runs every later event is a
second one. Whatever happens, no rule may be broken (``judge.py``). A loss that comes while the job says that its
replica is whole must not be noticed: every step is made once, and the last numbers are those of the undisturbed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import Role
from lockstep.sim.replicas.world import Harm, HarmPoint, ReplicaMaker, ReplicaRun, ReplicaScenario, ReplicaWorld
from lockstep.sim.violation import Rule, Violation

KILLS = (Harm.KILL, Harm.KILL_LOSING)


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


def play(scenario: ReplicaScenario, maker: ReplicaMaker | None = None) -> ReplicaRun:
    """Play one run; Violation where it breaks a rule, or ends otherwise than it must."""
    world = ReplicaWorld(scenario, maker)
    run = world.run()
    is_cut = any(point.harm is Harm.CUT for point in scenario.harms)
    if Cause.NO_PATH in run.causes and not is_cut:
        raise Violation(Rule.NO_END, f"a server waited for one that it could reach: {run.reasons}", story=world.story())
    if not run.ok and (world.judge.must_complete or _one_may_go_on(scenario)):
        text = f"the job had a replica of everything, and ended: {'; '.join(run.reasons)}"
        raise Violation(Rule.BAD_END, text, story=world.story())
    if run.ok and run.numbers != undisturbed(scenario):
        raise Violation(Rule.NOT_REPEATED, f"the last numbers are {run.numbers}, not {undisturbed(scenario)}")
    return run


def _one_may_go_on(scenario: ReplicaScenario) -> bool:
    """Servers that are cut from each other: one ends, and the other one gets the proof of that."""
    return scenario.proof_passes and {point.harm for point in scenario.harms} == {Harm.CUT}


_KNOWN: dict[tuple[int, int, int, int], tuple[tuple[int, int], ...]] = {}


def undisturbed(scenario: ReplicaScenario) -> tuple[tuple[int, int], ...]:
    """The last numbers of a run without harm: they depend on the job, not on the order of events."""
    key = (scenario.servers, scenario.workers, scenario.buckets, scenario.steps)
    if key not in _KNOWN:
        _KNOWN[key] = ReplicaWorld(replace(scenario, seed=0, harms=())).run().numbers
    return _KNOWN[key]


def points_of(run: ReplicaRun, harms: tuple[Harm, ...] = KILLS, role: Role | None = None) -> Iterator[HarmPoint]:
    """Every event of a run before its end, with every harm, before and after its effects."""
    for task, number in run.moments:
        if role in (None, task.role):
            for harm in harms:
                yield HarmPoint(task, number, harm, effects_done=True)
                if harm in KILLS:
                    yield HarmPoint(task, number, harm, effects_done=False)


def search_one(scenario: ReplicaScenario, harms: tuple[Harm, ...] = KILLS, stride: int = 1) -> ReplicaTally:
    """Harm at every event (at every ``stride``-th)."""
    tally = ReplicaTally()
    for point in list(points_of(_first(scenario), harms))[::stride]:
        _note(tally, replace(scenario, harms=(point,)))
    return tally


def search_two(scenario: ReplicaScenario, first: HarmPoint, stride: int = 1) -> ReplicaTally:
    """A second kill at every event (at every ``stride``-th) after ``first``, which may be of any task."""
    tally = ReplicaTally()
    begun = replace(scenario, harms=(first,))
    try:
        run = play(begun)
    except Violation:
        return tally  # found by the search for one
    position = run.moments.index((first.task, first.event)) if (first.task, first.event) in run.moments else 0
    for task, number in run.moments[position + 1 :: stride]:
        second = HarmPoint(task, number, first.harm, first.effects_done)
        _note(tally, replace(scenario, harms=(first, second)))
    return tally


def _first(scenario: ReplicaScenario) -> ReplicaRun:
    return play(replace(scenario, harms=()))


def _note(tally: ReplicaTally, scenario: ReplicaScenario) -> None:
    tally.runs += 1
    try:
        run = play(scenario)
    except Violation as broken:
        tally.broken.append((scenario, broken))
        return
    tally.events += run.events
    tally.takeovers += run.takeovers
    tally.endings["completed" if run.ok else "; ".join(run.reasons)] += 1
