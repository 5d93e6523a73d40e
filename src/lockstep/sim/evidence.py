"""What the analysis (``lockstep.diagnose``) would receive if it asked every simulated task and its monitor now."""

from __future__ import annotations

import json
from typing import Any

from lockstep.diagnose.evidence import Evidence, Seen
from lockstep.diagnose.fields import FORMAT
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.views import MonitorView, TaskView
from lockstep.protocol import phrases
from lockstep.protocol.core.activity import Code, Doing
from lockstep.protocol.core.faults import FaultPlace
from lockstep.protocol.core.ids import TaskId, hex64
from lockstep.protocol.core.journal import tensor_states
from lockstep.protocol.core.reach import NOT_SILENT, Reach, Silence
from lockstep.sim.network import Link
from lockstep.sim.server_side import SimulatedServer
from lockstep.sim.task import SimTask
from lockstep.sim.worker_side import SimulatedWorker
from lockstep.sim.world import World

JUST_NOW = 0.5
"""How long ago a peer sent something over a link that works: heartbeats come every second."""
WATCHED = 2.0
HEARTBEAT_BYTES = 100
NOTHING_LISTENS = Silence(Reach.REFUSED, "nothing listens there")
_DETAIL = {FaultPlace.INPUT.value: "a file of the input", FaultPlace.CHECKPOINT.value: "a checkpoint"}

_COMPUTING_AT = {
    FaultPlace.LOOP.value: Code.USER,
    FaultPlace.NO_DEVICE.value: Code.USER,
    FaultPlace.COMPILER.value: Code.COMPILER,
    FaultPlace.DEVICE.value: Code.DEVICE,
}
"""A training thread that is stuck at one of these reports that it computes; whose code its stack is in."""


def evidence_of(world: World, patience: float = 3.0) -> Evidence:
    """Everything there is to know about a simulated cluster, in the form that a real one reports."""
    now = world.agenda.now
    seen = {str(name): _seen(world, name, task, now) for name, task in world.tasks.items()}
    return Evidence(tasks=seen, asker="simulation", time=now, patience=patience)


def _seen(world: World, name: TaskId, task: SimTask, now: float) -> Seen:
    if not task.started:
        return Seen(task=str(name), silence=NOTHING_LISTENS, monitor_silence=NOTHING_LISTENS)
    answers = task.lives and (not task.frozen or task.answers)
    view: TaskView | None = None
    if answers:
        view = read_task(json.dumps(_snapshot(world, name, task, now)).encode())
    silence = NOT_SILENT if answers else Silence(Reach.MUTE if task.lives else Reach.BROKEN)
    return Seen(task=str(name), view=view, silence=silence, monitor=_monitor(name, task, now))


def _monitor(name: TaskId, task: SimTask, now: float) -> MonitorView:
    stopped = task.frozen and not task.answers
    return MonitorView(
        task=str(name),
        host=f"host-{name.role.value}-{name.index}",
        pid=1000 + name.index,
        incarnation=hex64(task.machine.incarnation),
        phase="training",
        exited=task.died_at >= 0,
        exit_code=task.exit_code,
        state="stopped" if stopped else "running",
        stopped=now - task.frozen_since if stopped else -1.0,
    )


def _snapshot(world: World, name: TaskId, task: SimTask, now: float) -> dict[str, Any]:
    machine = task.machine
    loop = {"busy": now - task.frozen_since, "what": "an event", "queued": len(task.events)} if task.frozen else {}
    return {
        "format": FORMAT,
        "kind": "task",
        "task": str(name),
        "incarnation": hex64(machine.incarnation),
        "step": machine.role.step,
        "phase": "simulated",
        "machines": machine.snapshot(),
        "main": {} if task.worker is None else _main(task.worker, now),
        "store": {} if task.server is None else _store(task.server, now),
        "loop": loop,
        "disk": {} if task.worker is None else {"written_ago": now - task.worker.doing[1]},
        "waits": [
            {
                "on": str(wait.on),
                "kind": wait.kind.value,
                "key": "" if wait.key is None else str(wait.key),
                "what": phrases.waited_for(wait),
                "step": wait.step,
                "seconds": now - wait.since,
                "state": wait.state,
                "bucket": wait.bucket,
            }
            for wait in machine.waits()
        ],
        "links": [_link(world, task, peer, link, now) for peer, link in world.network.links_of(name)],
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


def _main(side: SimulatedWorker, now: float) -> dict[str, Any]:
    doing, since = side.doing
    seconds = now - since
    # A slow step uses the processor; one that is stuck does not.
    loops = doing == FaultPlace.LOOP.value
    return {
        "doing": Doing.COMPUTING.value if doing in _COMPUTING_AT else doing,
        "detail": _DETAIL.get(doing, ""),
        "seconds": seconds,
        "cpu": 0.9 if doing == Doing.COMPUTING or loops else 0.0,
        "where": _COMPUTING_AT.get(doing, Code.USER).value,
        "dwells": {"place": "a loop", "seconds": seconds, "innermost": True} if loops else {},
    }


def _store(side: SimulatedServer, now: float) -> dict[str, Any]:
    if side.applying is None:
        return {}
    effect, since = side.applying
    cpu = 0.9 if side.slow_is_busy else 0.0
    return {"doing": f"update bucket {effect.bucket}", "busy": now - since, "queued": 0, "cpu": cpu}


def _link(world: World, task: SimTask, peer: TaskId, link: Link, now: float) -> dict[str, Any]:
    """One end of a link: what the peer sent, and what the kernel knows of the bytes between the two."""
    name = task.machine.task
    here, there = link.end(name), link.end(peer)
    other = world.tasks[peer]
    silent_since = [
        since
        for since, is_so in (
            (here.blocked_from, here.blocked(now)),
            # Over TCP, the deaf end's acknowledgements are missing, and soon nothing new comes from it either.
            (there.blocked_from, there.blocked(now)),
            (other.frozen_since, other.frozen and not other.answers),
            (link.cut_at, link.cut),
        )
        if is_so
    ]
    fields: dict[str, Any] = {
        "peer": str(peer),
        "state": "up" if here.up else "lost",
        "heard": max([JUST_NOW, *(now - since for since in silent_since)]),
        "incarnation": hex64(world.incarnations[peer]),
    }
    blocked = here.blocked(now) or there.blocked(now)
    since, until = task.blocked_callbacks.get(peer, (0.0, 0.0))
    if since <= now < until:
        return {**fields, "heard": JUST_NOW, "callback": {"name": "on_arrival", "seconds": now - since}}
    if blocked:
        fields["kernel"] = {
            "watched": WATCHED,
            "waiting": HEARTBEAT_BYTES,
            "segments_in": 0 if here.blocked(now) else 3,
        }
    return fields
