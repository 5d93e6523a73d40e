"""Synthetic snapshots of a small cluster that hangs, for tests of the analysis.

``healthy()`` gives the JSON of every task and monitor of one server (or two) and two workers in step 10. A test breaks
something in it and calls ``evidence``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.diagnose.evidence import Ended, Evidence, Seen
from lockstep.diagnose.fields import FORMAT
from lockstep.diagnose.monitor_view import read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.protocol.core.reach import NOT_SILENT, Reach, Silence
from lockstep.protocol.core.waits import WaitKind

STEP = 10
VERSION = "1.0"
MUTE = Silence(Reach.MUTE, "accepts connections but sends nothing (0.6 s)")
LIFE = {"ps": 0x100, "worker": 0x200}
Fields = dict[str, Any]


def life(task: TaskId) -> str:
    return f"{LIFE[task.role.value] + task.index:016x}"


def key(source: TaskId, target: TaskId, name: str) -> str:
    return f"{source};{life(source)};{target};{name};0:0"


def link(peer: TaskId, **changes: Any) -> Fields:
    fields: Fields = {
        "peer": str(peer),
        "state": "up",
        "heard": 0.3,
        "incarnation": life(peer),
        "path": f"gRPC stream to {peer.short}",
        "sent": 1000,
        "received": 1000,
        "moved": 0,
        "moving": [],
        "callback": None,
        "finding": "",
        "kernel": {"watched": 2.0, "waiting": 0, "segments_in": 5},
    }
    return {**fields, **changes}


def wait(on: TaskId, what: str | WaitKind, seconds: float, step: int = STEP, bucket: int = 0, **changes: Any) -> Fields:
    """``what``: the key of a tensor, or whatever else the task waits for."""
    kind = what if isinstance(what, WaitKind) else WaitKind(what.split(";")[3].partition("/")[0])
    fields: Fields = {
        "on": str(on),
        "kind": kind.value,
        "key": "" if isinstance(what, WaitKind) else what,
        "what": what,
        "step": step,
        "seconds": seconds,
        "state": "asked for",
        "bucket": bucket,
        "names": ["layer.weight"],
    }
    return {**fields, **changes}


@dataclass
class Cluster:
    """The JSON of all snapshots, to be changed by a test."""

    shape: ClusterShape
    tasks: dict[str, Fields] = field(default_factory=dict)
    monitors: dict[str, Fields] = field(default_factory=dict)
    silent: dict[str, Silence] = field(default_factory=dict)
    """Tasks that give no snapshot, with the reason."""
    monitor_silent: dict[str, Silence] = field(default_factory=dict)
    words: dict[str, dict[str, Word]] = field(default_factory=dict)
    """What other tasks know of those that do not answer."""
    end: Ended | None = None

    def task(self, task: TaskId) -> Fields:
        return self.tasks[str(task)]

    def monitor(self, task: TaskId) -> Fields:
        return self.monitors[str(task)]

    def link(self, one: TaskId, other: TaskId) -> Fields:
        found: Fields = next(entry for entry in self.task(one)["links"] if entry["peer"] == str(other))
        return found

    def both_unheard(self, one: TaskId, other: TaskId, seconds: float = 5.0) -> None:
        self.link(one, other)["heard"] = seconds
        self.link(other, one)["heard"] = seconds

    def no_answer(self, task: TaskId, why: Silence = MUTE) -> None:
        self.silent[str(task)] = why
        for fields in self.tasks.values():
            for entry in fields["links"]:
                if entry["peer"] == str(task):
                    entry["heard"] = 5.0

    def vanish(self, task: TaskId, why: Silence, **words: Word) -> None:
        """Neither the task nor its monitor answers. ``words``: what ``ps0``, ``worker0`` and so on know of it."""
        self.no_answer(task, why)
        self.monitor_silent[str(task)] = why
        names = {f"{other.role.value}{other.index}": str(other) for other in self.shape.tasks()}
        self.words[str(task)] = {names[short]: word for short, word in words.items()}

    def evidence(self, **changes: Any) -> Evidence:
        seen = {}
        for name in self.tasks:
            mute, no_monitor = self.silent.get(name), self.monitor_silent.get(name)
            seen[name] = Seen(
                task=name,
                address="10.0.0.1:2222",
                view=None if mute is not None else read_task(json.dumps(self.tasks[name]).encode()),
                silence=mute or NOT_SILENT,
                monitor=None if no_monitor is not None else read_monitor(json.dumps(self.monitors[name]).encode()),
                monitor_silence=no_monitor or NOT_SILENT,
                words=self.words.get(name, {}),
            )
        return Evidence(**{"tasks": seen, "version": VERSION, "end": self.end, **changes})


def healthy(servers: int = 1, workers: int = 2) -> Cluster:
    """All tasks are in step 10, and none has waited long."""
    cluster = Cluster(ClusterShape(servers, workers))
    for task in cluster.shape.tasks():
        cluster.tasks[str(task)] = _task(cluster.shape, task)
        cluster.monitors[str(task)] = _monitor(task)
    return cluster


def _task(shape: ClusterShape, task: TaskId) -> Fields:
    is_worker = task in shape.worker_ids()
    peers = shape.server_ids() if is_worker else tuple(t for t in shape.tasks() if t != task)
    return {
        "format": FORMAT,
        "kind": "task",
        "task": str(task),
        "incarnation": life(task),
        "job": "000000000000cafe",
        "version": VERSION,
        "host": f"host-{task.role.value}-{task.index}",
        "pid": 1000 + task.index,
        "phase": "training",
        "step": STEP,
        "steps": {"done": STEP, "median": 0.02, "usual": 2.0},
        "main": {"doing": "computing", "detail": "", "seconds": 0.01, "cpu": 0.9, "where": "user code", "stack": []}
        if is_worker
        else {},
        "machines": {"role": _worker_books(shape) if is_worker else _server_books(shape, task)},
        "waits": [],
        "links": [link(peer) for peer in peers],
        "tensors": [],
        "progress": {"seconds": 0.1},
        "loop": {"busy": 0.0, "queued": 0},
        "store": {} if is_worker else {"doing": "", "busy": 0.0, "queued": 0, "cpu": 0.0},
        "parts": {"computing": 0.015, "waiting": 0.004} if is_worker else {"updating": 0.002},
        "spans": [{"part": "computing", "what": "computing, step 9", "begin": 0.05, "end": 0.03}],
        "disk": {"folder": "/tmp/run", "free": 1 << 40, "written_ago": 0.0},
    }


def _worker_books(shape: ClusterShape) -> Fields:
    return {
        "wants_version": STEP + 1,
        "buckets": [{"id": 0, "server": 0, "state": "held", "version": STEP, "busy": False}],
        "servers": [{"task": str(one), "linked": True, "open_step": STEP, "awaited": 1} for one in shape.server_ids()],
    }


def _server_books(shape: ClusterShape, task: TaskId) -> Fields:
    return {
        "step": STEP,
        "committed": STEP - 1,
        "buckets": [{"id": 0, "state": "collecting", "version": STEP, "arrived": []}],
        "workers": [
            {"task": str(one), "linked": True, "granted": True, "pulls": STEP + 1, "done": None}
            for one in shape.worker_ids()
        ],
    }


def _monitor(task: TaskId) -> Fields:
    return {
        "format": FORMAT,
        "kind": "monitor",
        "description": {
            "task": str(task),
            "host": f"host-{task.role.value}-{task.index}",
            "pid": 1000 + task.index,
            "incarnation": int(life(task), 16),
            "job": 0xCAFE,
            "version": VERSION,
            "phase": "training",
            "phase_seconds": 30.0,
            "task_address": "10.0.0.1:3333",
            "exited": False,
            "exit_code": 0,
        },
        "process": {"state": "sleeping"},
        "stopped_seconds": -1.0,
        "out_of_memory": None,
    }


GRADIENT, PARAMETER = "gradient/bucket_0", "parameter/bucket_0"
PS0, PS1, W0, W1 = server(0), server(1), worker(0), worker(1)


def missing_gradient(servers: int = 1, seconds: float = 5.0) -> Cluster:
    """The server waits for the gradient of worker 1; worker 0 has sent its own and waits for the next version."""
    cluster = healthy(servers)
    ps = cluster.task(PS0)
    ps["waits"] = [wait(W1, key(W1, PS0, GRADIENT), seconds)]
    ps["machines"]["role"]["buckets"][0]["arrived"] = [str(W0)]
    ps["tensors"] = [tensor("gradient", STEP, -1, W1, requested=seconds, repeated=1.0)]
    w0 = cluster.task(W0)
    w0["main"] = {"doing": "waiting", "detail": f"version {STEP + 1}", "seconds": seconds, "cpu": 0.0}
    w0["waits"] = [wait(PS0, key(PS0, W0, PARAMETER), seconds)]
    w0["machines"]["role"]["buckets"][0]["state"] = "confirmed"
    return cluster


def tensor(kind: str, number: int, bucket: int, peer: TaskId, **ages: float) -> Fields:
    named = {state.replace("_", " "): age for state, age in ages.items()}
    counts: Mapping[str, int] = {state: 3 if state == "requested" else 1 for state in named}
    return {"kind": kind, "number": number, "bucket": bucket, "peer": str(peer), "ages": named, "counts": dict(counts)}


def waiting_worker(cluster: Cluster, task: TaskId = W1, seconds: float = 5.0, state: str = "offered") -> None:
    """This worker has sent its gradient, as far as it knows, and waits for the next version."""
    fields = cluster.task(task)
    fields["main"] = {"doing": "waiting", "detail": f"version {STEP + 1}", "seconds": seconds, "cpu": 0.0}
    fields["waits"] = [wait(PS0, key(PS0, task, PARAMETER), seconds)]
    fields["machines"]["role"]["buckets"][0]["state"] = state


def standing(cluster: Cluster, doing: str, where: str = "user code", cpu: float = 0.0, detail: str = "") -> Cluster:
    """The training thread of worker 1 has been doing this for five seconds."""
    cluster.task(W1)["main"] = {
        "doing": doing,
        "detail": detail,
        "seconds": 5.0,
        "cpu": cpu,
        "where": where,
        "stack": ["read (/home/user/train.py:12)"],
    }
    return cluster
