"""The state machines of a running job, with messages that a member may send and no program of ours would."""

from __future__ import annotations

import copy
import copyreg
import json
import zlib
from collections.abc import Iterator
from types import MappingProxyType

from fuzz.engine import Target
from helpers.playing import run_until
from lockstep.protocol.core.errors import ProtocolError
from lockstep.protocol.core.events import Received
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.sim.scenario import Scenario, TrainingProfile
from lockstep.sim.world import World
from lockstep.transports.control import codec

_STEP = 2
_MOST_SECONDS = 100.0
_ROLES = {"coordinator": server(0), "server": server(1), "chief": worker(0), "worker": worker(1)}


copyreg.pickle(MappingProxyType, lambda shown: (MappingProxyType, (dict(shown),)))  # copying takes this way too


def machine_targets(envelopes: list[bytes]) -> Iterator[Target]:
    for name in _ROLES:
        yield Target(f"machine: {name}", _Played(_ROLES[name]).hear, envelopes, (codec.WireError, ProtocolError))


class _Played:
    """One task in the middle of a job; it is the same at each message. Played when the first one comes."""

    def __init__(self, task: TaskId) -> None:
        self._task = task
        self._world: World | None = None

    def hear(self, data: bytes) -> None:
        message = codec.decode(data).message
        world = self._world = self._world or _played()
        sim = world.tasks[self._task]
        peers = [peer for peer in world.tasks if peer != self._task]
        peer = peers[zlib.crc32(data) % len(peers)]
        machine = copy.deepcopy(sim.machine)
        machine.handle(Received(peer, world.incarnations[peer], message), world.agenda.now)
        machine.next_deadline()
        machine.waits()
        json.dumps(machine.snapshot())


def _played() -> World:
    world = World(Scenario(seed=1, servers=2, workers=2, training=TrainingProfile(steps=6)))
    begun = run_until(world, lambda one: one.tasks[worker(0)].machine.role.step >= _STEP, _MOST_SECONDS)
    assert begun, "the simulated job did not get to its step"
    return world
