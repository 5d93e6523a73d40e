"""What can be done to a running simulated cluster: stop a task, kill it, start it again, cut it off."""

from __future__ import annotations

from functools import partial

from lockstep.protocol.core.ids import TaskId
from lockstep.sim.task import SimTask
from lockstep.sim.world import World


def freeze(world: World, task: SimTask, seconds: float, *, answers: bool = False) -> None:
    """Stop the process; incoming events wait. ``answers``: only its loop is stuck, its other threads still answer."""
    if task.frozen:
        return
    task.frozen_since = world.agenda.now
    task.answers = answers
    world.agenda.after(seconds, partial(thaw, world, task))


def thaw(world: World, task: SimTask) -> None:
    """Let the process continue: first what its threads had to do, then what came in."""
    if not task.frozen:
        return
    task.frozen_since = -1.0
    held, task.held_up = task.held_up, []
    for action in held:
        if task.lives:
            action()
    if task.events:
        world.drain_later(task)


def crash(world: World, task: SimTask, *, restart_after: float) -> None:
    """Kill the process; start it again later, unless ``restart_after`` is negative."""
    name = task.machine.task
    world.kill(task, "was killed by signal 9", -9)
    if restart_after >= 0:
        world.restart_after(name, restart_after)


def block(world: World, task: TaskId, peer: TaskId, until: float, *, one_way: bool) -> None:
    """From now until then nothing passes from ``task`` to ``peer``, nor (unless ``one_way``) back."""
    link = world.network.link(task, peer)
    for end in (link.end(peer),) if one_way else link.ends():
        end.blocked_from, end.blocked_until = world.agenda.now, until


def block_callback(world: World, task: SimTask, peer: TaskId, seconds: float) -> None:
    """A callback of the link to ``peer`` does not return: nothing more arrives on it."""
    name = task.machine.task
    block(world, peer, name, world.agenda.now + seconds, one_way=True)
    task.blocked_callbacks[peer] = (world.agenda.now, world.agenda.now + seconds)
