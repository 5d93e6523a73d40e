"""Draws whole runs: from a seed, a cluster of the given size with its network, its training loop and its faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from lockstep.protocol.core.faults import (
    BlockCallback,
    BlockLoop,
    Die,
    DropMessage,
    DropTensor,
    EndEarly,
    FaultPlace,
    Freeze,
    OddModel,
    OddSetting,
    Raise,
    SlowSteps,
    SlowStore,
    Stick,
)
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.sim.faults import AnyFault, Crash, LoseConnection, Partition, Pause, StartLate
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile

QUIET_AFTER = 40.0
STARTUP_TIMEOUT = 60.0
CALLS_EVERY = 3
"""In every third run programs make calls."""
_MODES = (Mode.EAGER, Mode.EAGER, Mode.SEALED, Mode.SEALED, Mode.ASYNC, Mode.ASYNC_SEALED)
_MODES_OF_RANKS = (Mode.EAGER, Mode.EAGER, Mode.SEALED)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of every drawn run."""

    workers: int = 8
    servers: int = 2
    steps: int = 3


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A scenario and the faults to plant in it."""

    scenario: Scenario
    faults: tuple[AnyFault, ...]


def draw_run(seed: int, size: Size) -> DrawnRun:
    """The run of this seed."""
    random = Random(seed)
    mode = random.choice(_MODES if size.servers else _MODES_OF_RANKS)
    aggregate = None
    if mode is Mode.SEALED and size.servers and size.workers > 1 and random.random() < 0.2:
        aggregate = random.randint(1, size.workers - 1)
    buckets = random.randint(1, 4)
    scenario = Scenario(
        seed=seed,
        servers=size.servers,
        workers=size.workers,
        mode=mode,
        aggregate=aggregate,
        parameters=tuple(ParameterEntry(f"p{i}", random.choice((3, 16, 24)), "float32", i % 2) for i in range(buckets)),
        network=_network(random),
        training=replace(
            _training(random, size.steps, calls=aggregate is None and seed % CALLS_EVERY == 0),
            clip_chance=_clip_chance(seed),
            seals_early=_seals_early(seed),
        ),
        start=SecondsRange(0.0, random.choice((0.0, 1.0, 10.0))),
        startup_timeout=STARTUP_TIMEOUT,
        patience=400.0,
    )
    how_many = random.choice((0, 1, 1, 1, 2, 2, 3))
    return DrawnRun(scenario, _faults(random, scenario, how_many))


def _clip_chance(seed: int) -> float:
    """Drawn apart, so that everything else about a seed stays as it is."""
    return Random(f"clip {seed}").choice((0.0, 0.7))


def _seals_early(seed: int) -> bool:
    """Likewise."""
    return Random(f"early {seed}").random() < 0.5


def _network(random: Random) -> NetworkProfile:
    storm = random.choice((0.0, 0.3, 1.0))
    lent = random.random() < 0.25
    return NetworkProfile(
        latency=random.choice((SecondsRange(0.0001, 0.01), SecondsRange(0.0, 0.3))),
        late_chance=0.05 * storm,
        in_order=random.random() < 0.6,
        duplicate_chance=0.2 * storm,
        reset_chance=0.01 * storm,
        transfer_failure_chance=0.03 * storm,
        ghost_chance=0.1 * storm,
        lent_in_place=lent,
        bandwidth=0.0 if lent or random.random() < 0.5 else random.choice((2e3, 2e4)),
        shared_hosts=random.random() < 0.2,
        quiet_after=QUIET_AFTER,
    )


def _training(random: Random, steps: int, *, calls: bool) -> TrainingProfile:
    return TrainingProfile(
        steps=steps,
        calls=calls,
        forward=SecondsRange(0.0, random.choice((0.05, 1.0))),
        backward=SecondsRange(0.0, random.choice((0.02, 0.5))),
        apply=SecondsRange(0.0, random.choice((0.02, 0.5))),
        loop_seconds=random.choice((0.0, 0.0, 0.001)),
        absent_chance=random.choice((0.0, 0.1)),
        edit_chance=0.3,
        withdraw_chance=0.1,
        void_chance=random.choice((0.0, 0.1)),
        rates_at_seal=random.random() < 0.5,
    )


def _faults(random: Random, scenario: Scenario, how_many: int) -> tuple[AnyFault, ...]:
    drawn: dict[str, AnyFault] = {}
    if len(scenario.shape.tasks()) == 1:
        return ()  # no task would be left to tell of its end
    while len(drawn) < min(how_many, len(scenario.shape.tasks())):
        fault = random.choice(list(_DRAWING.values()))(random, scenario)
        # Either of two faults of one task could hide the other.
        drawn.setdefault(fault.task, fault)
    return tuple(drawn.values())


# -- one function per kind --


def _any(random: Random, scenario: Scenario) -> str:
    return str(random.choice(scenario.shape.tasks()))


def _worker(random: Random, scenario: Scenario) -> str:
    return str(random.choice(scenario.shape.worker_ids()))


def _home(random: Random, scenario: Scenario) -> str:
    return str(random.choice(scenario.shape.homes))


def _worker_and_home(random: Random, scenario: Scenario) -> tuple[str, str]:
    """A worker and a home of buckets that it is linked to."""
    if scenario.servers:
        return _worker(random, scenario), _home(random, scenario)
    one, other = random.sample(scenario.shape.worker_ids(), 2)
    return str(one), str(other)


def _pair(random: Random, scenario: Scenario) -> tuple[str, str]:
    """A worker and a home, in either order: every worker is linked to every home."""
    ends = list(_worker_and_home(random, scenario))
    random.shuffle(ends)
    return ends[0], ends[1]


def _step(random: Random, scenario: Scenario) -> int:
    return random.randrange(max(1, scenario.training.steps))


def _moment(random: Random) -> float:
    return round(random.uniform(0.5, 20.0), 3)


def _length(random: Random) -> float:
    return round(random.choice((random.uniform(0.1, 3.0), random.uniform(3.0, 18.0))), 3)


def _drop_message(random: Random, scenario: Scenario) -> AnyFault:
    times = random.choice((0, 1, 3))
    opens = random.random() < 0.5
    worker, home = _worker_and_home(random, scenario)
    if opens:
        return DropMessage(home, worker, "Open", _step(random, scenario), times)
    return DropMessage(worker, home, "Pull", _step(random, scenario), times)


def _drop_tensor(random: Random, scenario: Scenario) -> AnyFault:
    task, peer = _pair(random, scenario)
    return DropTensor(task, peer, _step(random, scenario), -1, random.choice((0, 1, 2)))


def _partition(random: Random, scenario: Scenario) -> AnyFault:
    task, peer = _pair(random, scenario)
    seconds = -1.0 if random.random() < 0.3 else _length(random)
    return Partition(task, peer, _moment(random), seconds, one_way=random.random() < 0.5)


def _lose_connection(random: Random, scenario: Scenario) -> AnyFault:
    task, peer = _pair(random, scenario)
    return LoseConnection(task, peer, _moment(random))


def _crash(random: Random, scenario: Scenario) -> AnyFault:
    restart = random.choice((-1.0, -1.0, 0.5, 5.0))
    return Crash(_any(random, scenario), _moment(random), restart)


def _stick(random: Random, scenario: Scenario) -> AnyFault:
    place = random.choice((FaultPlace.USER_CODE, FaultPlace.INPUT, FaultPlace.DEVICE)).value
    seconds = random.choice((_length(random), 1000.0))
    return Stick(_worker(random, scenario), place, _step(random, scenario), seconds)


def _block_callback(random: Random, scenario: Scenario) -> AnyFault:
    task, peer = _pair(random, scenario)
    seconds = random.choice((_length(random), 1000.0))
    return BlockCallback(task, peer, step=_step(random, scenario), seconds=seconds)


_DRAWING: Mapping[str, Callable[[Random, Scenario], AnyFault]] = MappingProxyType(
    {
        "Crash": _crash,
        "Die": lambda r, s: Die(_any(r, s), _step(r, s)),
        "Freeze": lambda r, s: Freeze(_any(r, s), _step(r, s)),
        "Pause": lambda r, s: Pause(_any(r, s), _moment(r), _length(r)),
        "Partition": _partition,
        "LoseConnection": _lose_connection,
        "StartLate": lambda r, s: StartLate(_any(r, s), r.choice((-1.0, 5.0, 30.0))),
        "DropMessage": _drop_message,
        "DropTensor": _drop_tensor,
        # Not before the first step: without synchronisation, a chief that never starts leaves the others without rates.
        "EndEarly": lambda r, s: EndEarly(_worker(r, s), max(1, _step(r, s))),
        "OddSetting": lambda r, s: OddSetting(_any(r, s)),
        # If the chief were the odd one, all others would be odd instead, so it never is.
        "OddModel": lambda r, s: OddModel(str(r.choice(s.shape.worker_ids()[1:] or s.shape.worker_ids()))),
        "Raise": lambda r, s: Raise(_worker(r, s), _step(r, s)),
        "Stick": _stick,
        "SlowSteps": lambda r, s: SlowSteps(_worker(r, s), _step(r, s), _length(r)),
        "SlowStore": lambda r, s: SlowStore(_home(r, s), _step(r, s), round(r.uniform(0.1, 4.0), 3), r.random() < 0.5),
        "BlockLoop": lambda r, s: BlockLoop(_any(r, s), _step(r, s), r.choice((_length(r), 1000.0))),
        "BlockCallback": _block_callback,
    }
)
