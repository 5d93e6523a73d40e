"""Runs of the machines with second homes, each disturbed in one way: what a search goes through."""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from lockstep.protocol.core.events import Event
from lockstep.protocol.core.ids import BucketId, Role, TaskId, server, worker
from lockstep.sim.replicas.judged_world import Cut, JudgedWorld
from lockstep.sim.replicas.search import SavingWorld
from lockstep.sim.replicas.world import Moment
from lockstep.sim.violation import Rule

from .library_world import STEPS, LibraryWorld

LATER: set[object] = {("later", server(0)), ("later", server(1))}
"""Second homes that take their time to make what they hold."""


class AgainWorld(JudgedWorld):
    """Every server that is killed comes back, and once all are whole again, another one may be killed."""

    dice = random.Random(0)
    calm: type[JudgedWorld] = JudgedWorld
    """The same without kills."""
    steps_of_it = 8

    def handle(self, name: TaskId, event: Event) -> None:
        task = self.tasks[name]
        may = name.role is Role.SERVER and task.alive and task.ended is None and len(self.killed) < 3
        if self.killed and may and self.dice.random() < 0.02 and self.is_whole:
            self.kills[name, task.events] = self.dice.random() < 0.5
        super().handle(name, event)


class LibraryAgainWorld(AgainWorld, LibraryWorld):
    """The same with workers as in programs of the library."""

    calm = LibraryWorld
    steps_of_it = STEPS


class Calm(NamedTuple):
    """The run that nobody disturbs."""

    numbers: dict[BucketId, int]
    moments: list[Moment]
    """After every task was a member."""
    last: dict[BucketId, int]
    """Its last checkpoint."""
    heard: dict[object, object]
    """What workers were told outside of the steps."""


def calm_run(kind: type[JudgedWorld] = JudgedWorld, **shape: int) -> Calm:
    world = kind(**shape)
    world.run()
    last = world.checkpoints.get(world.steps, {})
    return Calm(world.numbers(), world.history[world.formed_at :], last, world.heard)


def judged(world: JudgedWorld, calm: Calm, *, may_end: bool = False) -> bool:
    """Play it to its end; whether it ended well. ``may_end``: it need not, if all are told."""
    world.run(6_000)
    ends = [
        task.ended for task in world.tasks.values() if task.alive and task.ended is not None and not task.ended.alone
    ]
    if not all(end.ok for end in ends):
        if may_end and all(not end.ok and end.reason.text for end in ends):
            return False
        raise world.violation(Rule.BAD_END, "the job has ended")
    world.must(world.numbers() == calm.numbers, Rule.NOT_REPEATED, "other numbers")
    is_saved = not calm.last or world.checkpoints.get(world.steps) == calm.last
    world.must(is_saved, Rule.NOT_REPEATED, "another last checkpoint")
    is_same = all(calm.heard[what] == told for what, told in world.heard.items())
    world.must(is_same, Rule.WRONG_ANSWER, "workers heard something else")
    return True


def one_kill(calm: Calm, kind: type[JudgedWorld], first: int, stride: int) -> Iterator[JudgedWorld]:
    """Any task at every so-manieth event. What follows from the event still leaves, or not; what had left arrives, or
    not; a server comes back, or not."""
    for number, moment in enumerate(calm.moments[first::stride]):
        for variant in range(8) if stride == 1 else (number % 8,):
            world = kind()
            world.kills[moment] = bool(variant & 1)
            world.keeps_last_words = bool(variant & 2)
            world.servers_return = bool(variant & 4)
            world.lazy = LATER if number % 3 == 0 else set()
            yield world


def late_kills(seeds: range) -> Iterator[tuple[JudgedWorld, Calm]]:
    """A worker that has finished, or nearly so, while the last checkpoint is written; it comes back."""
    for seed in seeds:
        calm = calm_run(SavingWorld, seed=seed)
        last = [[moment for moment in calm.moments if moment[0] == one][-4:] for one in (worker(0), worker(1))]
        for moment in chain(*last):
            for variant in range(4):
                world = SavingWorld(seed=seed)
                world.kills[moment] = bool(variant & 1)
                world.lazy = LATER if variant & 2 else set()
                yield world, calm


def two_kills(
    calm: Calm, dice: random.Random, runs: int, kind: type[JudgedWorld] = JudgedWorld
) -> Iterator[JudgedWorld]:
    """A server, and shortly before or after it a worker, or, in every third run, the other server; all come back."""
    for number in range(runs):
        world = kind()
        at = dice.choice([n for n, moment in enumerate(calm.moments) if moment[0].role is Role.SERVER])
        first, near = calm.moments[at], calm.moments[max(0, at - 20) : at + 20]
        others = {worker(0), worker(1)} if number % 3 else {server(1 - first[0].index)}
        second = dice.choice([moment for moment in near if moment[0] in others] or [first])
        world.kills = {first: dice.random() < 0.5, second: dice.random() < 0.5}
        world.servers_return, world.keeps_last_words = True, dice.random() < 0.5
        world.lazy = LATER if number % 2 else set()
        yield world


def cut_servers(calm: Calm, first: int, stride: int, kind: type[JudgedWorld] = JudgedWorld) -> Iterator[JudgedWorld]:
    """One server is cut from the other, or from everybody, who then take it for dead; some cuts heal."""
    moments = [moment for moment in calm.moments if moment[0].role is Role.SERVER]
    for number, moment in enumerate(moments[first::stride]):
        one = moment[0]
        world = kind()
        believed = number % 2 == 1
        others = tuple(t for t in world.tasks if t != one) if believed else (server(1 - one.index),)
        world.cut = Cut(*moment, others, heals=not believed or number % 4 == 1, believed_dead=believed)
        world.lazy = LATER if number % 6 < 3 else set()
        yield world


def again_and_again(
    seeds: range, servers: int = 2, kind: type[AgainWorld] = AgainWorld
) -> Iterator[tuple[AgainWorld, Calm]]:
    """Up to three servers, each after all were whole again."""
    for seed in seeds:
        shape = {"seed": seed, "servers": servers, "steps": kind.steps_of_it, "buckets": 3}
        calm, dice = calm_run(kind.calm, **shape), random.Random(seed)
        world = kind(**shape)
        world.servers_return, world.dice, world.keeps_last_words = True, random.Random(seed), bool(seed % 2)
        moments = [moment for moment in calm.moments if moment[0].role is Role.SERVER]
        world.kills[dice.choice(moments[: len(moments) // 2])] = bool(seed % 3)
        yield world, calm


class Part(StrEnum):
    """What a search does to its runs."""

    KILL = "one kill"
    SAVE = "one kill, with checkpoints"
    LATE = "a worker is killed while the last checkpoint is written"
    CUT = "a cut"
    TWO = "two kills"
    AGAIN = "kills, each after all were whole again"
    LIBRARY = "one kill, in a program of the library"
    LIBRARY_TWO = "two kills, in a program of the library"
    LIBRARY_AGAIN = "kills, each after all were whole again, in a program of the library"


def search(part: Part, stride: int = 9) -> Iterator[tuple[JudgedWorld, Calm, bool]]:
    """Runs to be judged; the last field: whether the job may end."""
    of_library = part in (Part.LIBRARY, Part.LIBRARY_TWO, Part.LIBRARY_AGAIN)
    if part is Part.LATE:
        yield from ((world, calm, False) for world, calm in late_kills(range(12)))
        return
    kind = LibraryWorld if of_library else SavingWorld if part is Part.SAVE else JudgedWorld
    calm = calm_run(kind)
    if part in (Part.AGAIN, Part.LIBRARY_AGAIN):
        again = LibraryAgainWorld if of_library else AgainWorld
        yield from ((world, known, False) for world, known in again_and_again(range(40), kind=again))
    for first in range(stride):
        if part is Part.CUT:
            yield from ((world, calm, False) for world in cut_servers(calm, first, stride))
        elif part in (Part.TWO, Part.LIBRARY_TWO):
            yield from ((world, calm, True) for world in two_kills(calm, random.Random(first), 50, kind))
        else:
            yield from ((world, calm, False) for world in one_kill(calm, kind, first, stride))
