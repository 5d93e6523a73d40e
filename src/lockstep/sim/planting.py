"""Plants faults in a simulated cluster.

Faults that change what a task is become part of the scenario; those that drop messages or tensors are planted in the
network; the rest happen to a task when its step, or its time, has come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.events import Broken
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
    OddVersion,
    Raise,
    SlowSteps,
    SlowStore,
    Stick,
)
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.core.messages import Message, Setting
from lockstep.sim import disturb
from lockstep.sim.faults import AnyFault, Crash, LoseConnection, Partition, Pause, StartLate
from lockstep.sim.scenario import Scenario
from lockstep.sim.world import World

FOREVER = float("inf")


def with_faults(scenario: Scenario, faults: Sequence[AnyFault]) -> Scenario:
    """The same scenario with the faults that change what a task is."""
    for fault in faults:
        task = TaskId.parse(fault.task)
        if task not in scenario.shape.tasks():
            raise ValueError(
                f"{fault.task} is not in a cluster of {scenario.servers} servers and {scenario.workers} workers"
            )
        match fault:
            case EndEarly(steps=steps):
                scenario = dataclasses.replace(scenario, odd_steps=(*scenario.odd_steps, (task, steps)))
            case OddSetting(name=name, value=value):
                settings = (*scenario.odd_settings, (task, Setting(name, value)))
                scenario = dataclasses.replace(scenario, odd_settings=settings)
            case OddModel():
                scenario = dataclasses.replace(scenario, odd_models=(*scenario.odd_models, task))
            case StartLate(seconds=seconds) if seconds < 0:
                scenario = dataclasses.replace(scenario, absentees=(*scenario.absentees, task))
            case StartLate(seconds=seconds):
                scenario = dataclasses.replace(scenario, late_starts=(*scenario.late_starts, (task, seconds)))
            case OddVersion():
                raise ValueError("OddVersion shows in the handshake of two processes; the simulator has no handshake")
            case _:
                continue
    return scenario


def plant(world: World, faults: Sequence[AnyFault]) -> Planted:
    """Plant what happens in the network and to running tasks; before ``run``."""
    planted = Planted(world, faults)
    if any(isinstance(fault, DropMessage) for fault in faults):
        world.network.loses_message = planted.loses_message
    if any(isinstance(fault, DropTensor) for fault in faults):
        world.network.loses_tensor = planted.loses_tensor
    for fault in faults:
        planted.arm(fault)
    return planted


class Planted:
    """The faults of one run, and which of them have struck."""

    def __init__(self, world: World, faults: Sequence[AnyFault]) -> None:
        self.struck: list[AnyFault] = []
        self._world = world
        self._faults = faults
        self._hits: dict[int, int] = {}
        self._at_step: dict[TaskId, list[tuple[Step, Callable[[], None]]]] = {}

    # -- what is lost --

    def _strikes(self, number: int, fault: DropMessage | DropTensor) -> bool:
        done = self._hits.get(number, 0)
        if fault.times and done >= fault.times:
            return False
        self._hits[number] = done + 1
        self._note(fault)
        return True

    def _note(self, fault: AnyFault) -> None:
        if fault not in self.struck:
            self.struck.append(fault)

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

    # -- what happens to a task --

    def arm(self, fault: AnyFault) -> None:
        """Plan when it strikes."""
        task = TaskId.parse(fault.task)
        match fault:
            case DropMessage() | DropTensor():
                return
            case EndEarly() | OddSetting() | OddModel() | StartLate():
                self._note(fault)
            case Crash(at=at) | Pause(at=at) | Partition(at=at) | LoseConnection(at=at):
                self._world.agenda.at(at, partial(self._strike, fault))
            case SlowSteps() | SlowStore() | Stick():
                self._hamper(task, fault)
            case (
                Freeze(step=step) | Die(step=step) | Raise(step=step) | BlockLoop(step=step) | BlockCallback(step=step)
            ):
                self._when_step(task, step, partial(self._strike, fault))
            case _:
                raise ValueError(f"{type(fault).__name__} cannot be planted in the simulator")

    def _hamper(self, task: TaskId, fault: SlowSteps | SlowStore | Stick) -> None:
        worker, server = self._world.tasks[task].worker, self._world.tasks[task].server
        self._note(fault)
        if isinstance(fault, SlowStore) and server is not None:
            server.slowed = (fault.step, fault.seconds)
            server.slow_is_busy = fault.busy
        elif isinstance(fault, SlowSteps) and worker is not None:
            worker.slowed = (fault.step, fault.seconds)
        elif isinstance(fault, Stick) and worker is not None:
            worker.stuck[fault.step] = (FaultPlace(fault.place).value, fault.seconds)
        else:
            raise ValueError(f"{type(fault).__name__} cannot happen to {fault.task}")

    def _when_step(self, task: TaskId, step: Step, action: Callable[[], None]) -> None:
        waiting = self._at_step.setdefault(task, [])
        waiting.append((step, action))
        if len(waiting) == 1:
            self._world.on_step[task] = partial(self._step_began, task)

    def _step_began(self, task: TaskId, step: Step) -> None:
        due = [action for at, action in self._at_step[task] if step >= at]
        self._at_step[task] = [(at, action) for at, action in self._at_step[task] if step < at]
        for action in due:
            action()

    def _strike(self, fault: AnyFault) -> None:
        world = self._world
        task = world.tasks[TaskId.parse(fault.task)]
        if not task.lives:
            return
        self._note(fault)
        match fault:
            case Crash(restart_after=after):
                disturb.crash(world, task, restart_after=after)
            case Die(signum=signum, exit_code=code):
                how = f"was killed by signal {signum}" if signum else f"ended with exit code {code}"
                world.kill(task, how, -signum if signum else code)
            case Freeze():
                disturb.freeze(world, task, FOREVER)
            case Pause(seconds=seconds):
                disturb.freeze(world, task, seconds)
            case BlockLoop(seconds=seconds):
                disturb.freeze(world, task, seconds, answers=True)
            case BlockCallback(peer=peer, seconds=seconds):
                disturb.block_callback(world, task, TaskId.parse(peer), seconds)
            case Partition(peer=peer, seconds=seconds, one_way=one_way):
                until = FOREVER if seconds < 0 else world.agenda.now + seconds
                disturb.block(world, task.machine.task, TaskId.parse(peer), until, one_way=one_way)
            case LoseConnection(peer=peer):
                world.network.link(task.machine.task, TaskId.parse(peer)).reset("connection reset")
            case Raise(text=text):
                world.handle(task.machine.task, Broken(task.machine.task, task.machine.role.step, own_error(text)))
            case _:
                raise ValueError(f"{type(fault).__name__} cannot be planted in the simulator")
