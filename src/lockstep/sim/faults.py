"""Plants faults (``protocol/faults.py``) in a simulated cluster, and looks at it with the eyes of the analysis.

Those that change what a task is become part of the scenario; those that take messages or tensors out are planted in
the network. A fault of a process (a freeze, a callback that blocks) has no meaning in a world without processes: it
is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.diagnose.evidence import Evidence, Seen
from lockstep.diagnose.views import read_task
from lockstep.protocol.faults import DropMessage, DropTensor, EndEarly, Fault, OddModel, OddSetting
from lockstep.protocol.ids import Role, TaskId, hex64
from lockstep.protocol.journal import tensor_states
from lockstep.protocol.messages import Message, Setting
from lockstep.protocol.waits import bucket_of
from lockstep.sim.scenario import Scenario
from lockstep.sim.world import SimTask, World


def with_faults(scenario: Scenario, faults: Sequence[Fault]) -> Scenario:
    """The same scenario with the faults that change what a task is."""
    for fault in faults:
        match fault:
            case EndEarly(task=task, steps=steps):
                odd = (*scenario.odd_steps, (TaskId.parse(task), steps))
                scenario = dataclasses.replace(scenario, odd_steps=odd)
            case OddSetting(task=task, name=name, value=value):
                settings = (*scenario.odd_settings, (TaskId.parse(task), Setting(name, value)))
                scenario = dataclasses.replace(scenario, odd_settings=settings)
            case OddModel(task=task):
                scenario = dataclasses.replace(scenario, odd_models=(*scenario.odd_models, TaskId.parse(task)))
            case DropMessage() | DropTensor():
                continue
            case _:
                raise ValueError(f"{type(fault).__name__} is a fault of a process; the simulator has none")
    return scenario


def plant(world: World, faults: Sequence[Fault]) -> None:
    """Plant what takes messages and tensors out of the network; before ``run``."""
    planted = _Planted(faults)
    world.network.loses_message = planted.loses_message
    world.network.loses_tensor = planted.loses_tensor


class _Planted:
    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._hits: dict[int, int] = {}

    def _strikes(self, number: int, fault: DropMessage | DropTensor) -> bool:
        done = self._hits.get(number, 0)
        if fault.times and done >= fault.times:
            return False
        self._hits[number] = done + 1
        return True

    def loses_message(self, sender: TaskId, receiver: TaskId, message: Message) -> bool:
        return any(
            isinstance(fault, DropMessage)
            and fault.task == str(sender)
            and fault.hits(receiver, message)
            and self._strikes(number, fault)
            for number, fault in enumerate(self._faults)
        )

    def loses_tensor(self, sender: TaskId, receiver: TaskId, number: int, bucket: int) -> bool:
        return any(
            isinstance(fault, DropTensor)
            and fault.task == str(sender)
            and fault.hits(receiver, number, bucket)
            and self._strikes(place, fault)
            for place, fault in enumerate(self._faults)
        )


def run_until(world: World, over: Callable[[World], bool], seconds: float) -> bool:
    """Play until ``over`` says so, for at most so many virtual seconds; whether it did."""
    world.begin()
    while len(world.agenda) and world.agenda.now < seconds:
        if over(world):
            return True
        world.agenda.run_next()
    return over(world)


def evidence_of(world: World) -> Evidence:
    """What the analysis would be given if it asked every simulated task now."""
    now = world.agenda.now
    seen = {}
    for name, task in world.tasks.items():
        view = read_task(json.dumps(_snapshot(name, task, world, now)).encode()) if task.lives else None
        seen[str(name)] = Seen(task=str(name), view=view, silence="" if view else "gone", monitor_silence="simulated")
    return Evidence(tasks=seen, asker="simulation", time=now)


def _snapshot(name: TaskId, task: SimTask, world: World, now: float) -> dict[str, Any]:
    machine = task.machine
    waits = machine.waits()
    longest = max((now - wait.since for wait in waits), default=0.0)
    is_worker = name.role is Role.WORKER
    sealed = is_worker and any("parameter/" in wait.what for wait in waits)
    return {
        "format": 1,
        "kind": "task",
        "task": str(name),
        "incarnation": hex64(machine.incarnation),
        "step": machine.role.step,
        "phase": "simulated",
        "machines": machine.snapshot(),
        "main": {"doing": "waiting" if sealed else "computing", "seconds": longest, "cpu": 0.9} if is_worker else {},
        "waits": [
            {
                "on": str(wait.on),
                "what": wait.what,
                "step": wait.step,
                "seconds": now - wait.since,
                "state": wait.state,
                "bucket": -1 if (key := wait.key()) is None else bucket_of(key),
            }
            for wait in waits
        ],
        "links": [
            {"peer": str(peer), "state": "lost" if link.cut else "up", "heard": 0.5}
            for peer, link in world.network.links_of(name)
        ],
        "tensors": [
            {
                "kind": one.kind,
                "number": one.number,
                "bucket": one.bucket,
                "peer": str(one.peer),
                "ages": {state.value: now - at for state, at in one.times.items()},
                "counts": {state.value: count for state, count in one.counts.items()},
            }
            for one in tensor_states(machine.journal, name.role, machine.role.step - 1, 1000)
        ],
    }
