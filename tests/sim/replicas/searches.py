"""Runs of the machines with second homes, each disturbed in one way: what a search goes through."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain
from typing import NamedTuple
from unittest.mock import patch

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import Apply, Effect, Send
from lockstep.protocol.core.events import Event
from lockstep.protocol.core.ids import BucketId, Role, TaskId, server, worker
from lockstep.protocol.core.messages import View
from lockstep.protocol.server import second_shard
from lockstep.sim.replicas.judged_world import Cut, JudgedWorld
from lockstep.sim.replicas.search import SavingWorld
from lockstep.sim.replicas.stores import Stores
from lockstep.sim.replicas.world import Moment
from lockstep.sim.violation import Rule

from .library_world import STEPS, LibraryWorld

LATER: set[object] = {("later", server(0)), ("later", server(1))}
"""Second homes that take their time to make what they hold."""


class ComparingWorld(JudgedWorld):
    """Both homes compare what they make in every second step, not in every fiftieth."""

    def run(self, limit: int | None = None) -> None:
        with patch.object(second_shard, "DIGEST_EVERY", 2):
            super().run(limit)


class DriftingWorld(ComparingWorld):
    """A second home makes one version of a mean that is wrong by a bit: the servers end it, and say so."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.stores = _DriftingStores(self, number)


class _DriftingStores(Stores):
    """One of the updates that second homes make (``number``, as they are made) is wrong."""

    def __init__(self, world: JudgedWorld, number: int) -> None:
        super().__init__(world)
        self._left = number

    def _update(self, name: TaskId, effect: Apply, mean: list[int]) -> None:
        self._left -= effect.in_background
        is_it = effect.in_background and self._left == 0
        super()._update(name, effect, [mean[0] ^ 1] if is_it else mean)


class FormingWorld(JudgedWorld):
    """Knows how many events there were until a task was told of a job."""

    begun_at = 0

    def judge(self, name: TaskId, effects: Sequence[Effect]) -> None:
        super().judge(name, effects)
        if not self.begun_at and any(isinstance(one, Send) and isinstance(one.message, View) for one in effects):
            self.begun_at = len(self.history)


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
    if isinstance(world, DriftingWorld):
        is_said = all(end.reason.cause is Cause.HOMES_DIFFER for end in ends)
        world.must(is_said, Rule.WRONG_BYTES, "both homes made something else, and nobody says so")
        return False
    if not all(end.ok for end in ends):
        if may_end and all(not end.ok and end.reason.text for end in ends):
            world.judge_return(ends)
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


def kills_while_forming(seeds: range) -> Iterator[tuple[JudgedWorld, Calm]]:
    """Two servers, or one twice, at every two events until a task is told of a job: whoever is killed comes back."""
    for seed in seeds:
        calm = calm_run(seed=seed)
        for words in (True, False):
            formed = _forming_run(seed, {}, words=words)
            for first in _of_servers(formed, 0):
                once = _forming_run(seed, {first: words}, words=words)
                for second in _of_servers(once, once.history.index(first) + 1):
                    yield _forming_world(seed, {first: words, second: words}, words=words), calm


def _forming_world(seed: int, kills: dict[Moment, bool], *, words: bool) -> FormingWorld:
    world = FormingWorld(seed=seed)
    world.kills, world.keeps_last_words, world.servers_return = kills, words, True
    return world


def _forming_run(seed: int, kills: dict[Moment, bool], *, words: bool) -> FormingWorld:
    world = _forming_world(seed, kills, words=words)
    world.run()
    return world


def _of_servers(world: FormingWorld, begin: int) -> list[Moment]:
    """The last of them tells of the job: that counts as before if nothing is heard of it."""
    end = world.begun_at - world.keeps_last_words
    return [moment for moment in world.history[begin:end] if moment[0].role is Role.SERVER]


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


def drifts() -> Iterator[DriftingWorld]:
    """Each update that a second home makes: of the initial parameters, and of two steps, for four buckets."""
    return (DriftingWorld(number) for number in range(1, 13))


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
    DRIFT = "a second home drifts"
    FORMING = "two kills of servers while the cluster forms"
    LATE = "a worker is killed while the last checkpoint is written"
    CUT = "a cut"
    COMPARE = "one kill, where homes compare what they make in every second step"
    TWO = "two kills"
    SAVE_TWO = "two kills, with checkpoints"
    AGAIN = "kills, each after all were whole again"
    LIBRARY = "one kill, in a program of the library"
    LIBRARY_TWO = "two kills, in a program of the library"
    LIBRARY_AGAIN = "kills, each after all were whole again, in a program of the library"


_KINDS = {Part.SAVE: SavingWorld, Part.SAVE_TWO: SavingWorld, Part.COMPARE: ComparingWorld}


def search(part: Part, stride: int = 9) -> Iterator[tuple[JudgedWorld, Calm, bool]]:
    """Runs to be judged; the last field: whether the job may end."""
    of_library = part in (Part.LIBRARY, Part.LIBRARY_TWO, Part.LIBRARY_AGAIN)
    if part in (Part.LATE, Part.FORMING):
        found = late_kills(range(12)) if part is Part.LATE else kills_while_forming(range(4))
        yield from ((world, calm, False) for world, calm in found)
        return
    kind = LibraryWorld if of_library else _KINDS.get(part, JudgedWorld)
    calm = calm_run(kind)
    if part in (Part.AGAIN, Part.LIBRARY_AGAIN):
        again = LibraryAgainWorld if of_library else AgainWorld
        yield from ((world, known, False) for world, known in again_and_again(range(40), kind=again))
    if part is Part.DRIFT:
        yield from ((world, calm, False) for world in drifts())
        return
    for first in range(stride):
        if part is Part.CUT:
            yield from ((world, calm, False) for world in cut_servers(calm, first, stride))
        elif part in (Part.TWO, Part.SAVE_TWO, Part.LIBRARY_TWO):
            yield from ((world, calm, True) for world in two_kills(calm, random.Random(first), 50, kind))
        else:
            yield from ((world, calm, False) for world in one_kill(calm, kind, first, stride))
