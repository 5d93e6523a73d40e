"""Playing a simulated world until a condition holds."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.sim.world import World


def run_until(world: World, over: Callable[[World], bool], seconds: float) -> bool:
    """Play until ``over`` holds, for at most that many virtual seconds; returns whether it did."""
    world.begin()
    while len(world.agenda) and world.agenda.now < seconds:
        if over(world):
            return True
        world.agenda.run_next()
    return over(world)
