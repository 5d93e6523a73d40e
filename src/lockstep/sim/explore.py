"""Plays one drawn run and reports how it went; the unit of a search through many seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.protocol.core.errors import ProtocolError
from lockstep.sim.expect import RunEnding, judge
from lockstep.sim.faults import AnyFault, end_of
from lockstep.sim.generate import DrawnRun, Size, draw_run
from lockstep.sim.machines import MachineMaker
from lockstep.sim.planting import plant, with_faults
from lockstep.sim.scenario import Mishap
from lockstep.sim.violation import BrokenRule, Violation, with_story
from lockstep.sim.watch import SimulatedWatchdog
from lockstep.sim.world import World


@dataclass(frozen=True, slots=True)
class Played:
    """How one run went."""

    seed: int
    seconds: float
    """Virtual seconds that it took."""
    events: int
    faults: tuple[AnyFault, ...]
    struck: tuple[AnyFault, ...]
    mishaps: tuple[Mishap, ...]
    ending: RunEnding | None
    broken: BrokenRule | None = None
    """Which rule was broken, if one was."""
    violation: str = ""
    """The same in words, with the last events."""

    @property
    def sound(self) -> bool:
        return self.broken is None

    @property
    def headline(self) -> str:
        return self.violation.partition("\n")[0]


def play(run: DrawnRun, maker: MachineMaker | None = None) -> Played:
    """Play one run to its end, with its faults, and judge it."""
    scenario = with_faults(run.scenario, run.faults)
    quiet = max([scenario.network.quiet_after, *(end_of(fault) for fault in run.faults)])
    world = World(scenario, maker)
    planted = plant(world, run.faults)
    watch = SimulatedWatchdog(world)
    watch.begin()
    ending: RunEnding | None = None
    found: Violation | None = None
    try:
        world.run(within=quiet + scenario.patience)
        ending = judge(world, planted, watch)
    except (Violation, ProtocolError) as broken:
        found = with_story(broken, world.story())
    return Played(
        seed=scenario.seed,
        seconds=world.agenda.now,
        events=world.agenda.done,
        faults=run.faults,
        struck=tuple(planted.struck),
        mishaps=tuple(world.network.network_faults.happened),
        ending=ending,
        broken=None if found is None else found.broken,
        violation="" if found is None else str(found),
    )


def play_seed(
    seed: int, size: Size, faults: Sequence[AnyFault] | None = None, maker: MachineMaker | None = None
) -> Played:
    """Play the run of this seed; ``faults`` replaces those that it draws."""
    run = draw_run(seed, size)
    return play(run if faults is None else replace(run, faults=tuple(faults)), maker)
