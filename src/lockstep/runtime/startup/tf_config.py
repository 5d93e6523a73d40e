"""The variable TF_CONFIG, in which TFJob and its like tell a process where all tasks are and which one it is.

``{"cluster": {"ps": [ADDRESS, ...], "worker": [...]}, "task": {"type": "worker", "index": 0}}``. A pure function of a
mapping. The chief (or master, its older name) is worker 0 here, and the workers follow; an evaluator belongs to no job.
A TFJob with dynamic workers writes a map instead of a list and names in it only the task itself: its lists are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from lockstep.errors import BadInput
from lockstep.foreign import JsonError, plain, read_json
from lockstep.protocol.core.ids import Role, TaskId

VARIABLE: Final = "TF_CONFIG"
_CHIEFS: Final = ("chief", "master")
_MOST_BYTES: Final = 1 << 20
_MOST_INDEX: Final = 1 << 20


class TfRole(StrEnum):
    """What the process is for."""

    SERVER = "ps"
    WORKER = "worker"
    EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True)
class TfConfig:
    """One process of a cluster; a list of hosts is None where the variable does not name all of them."""

    role: TfRole
    index: int
    ps_hosts: tuple[str, ...] | None
    worker_hosts: tuple[str, ...] | None

    @property
    def evaluates(self) -> bool:
        return self.role is TfRole.EVALUATOR

    @property
    def task(self) -> TaskId:
        """Which task of the job this is; not for an evaluator."""
        return TaskId(Role(self.role.value), self.index)

    def lists(self, ps_hosts: Sequence[str] = (), worker_hosts: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
        """The hosts of servers and of workers; what is given goes first. BadInput if some stay unknown."""
        found = (tuple(ps_hosts) or self.ps_hosts, tuple(worker_hosts) or self.worker_hosts)
        missing = [flag for flag, hosts in zip(("--ps_hosts", "--worker_hosts"), found, strict=True) if hosts is None]
        if missing:
            raise BadInput(
                f"{VARIABLE} does not name all tasks of the cluster, as in a TFJob with enableDynamicWorker; leave "
                f"that out there, or give {' and '.join(f'{flag}=HOST:PORT,...' for flag in missing)}."
            )
        return tuple(hosts or () for hosts in found)


def read_tf_config(environ: Mapping[str, str]) -> TfConfig | None:
    """What the variable says; None if it is not set, or describes no cluster. BadInput if it makes no sense."""
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        said = read_json(text, _MOST_BYTES)
    except JsonError as error:
        raise BadInput(f"the variable {VARIABLE} is not readable: {error}; correct it, or unset it.") from None
    cluster = said.get("cluster") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(cluster, dict | None):
        raise _senseless("has no cluster of the form {'worker': [...]}")
    if not cluster:
        return None
    task = said.get("task")
    if not isinstance(task, dict) or not isinstance(kind := task.get("type"), str):
        raise _senseless("does not say which task this process is")
    return _read(cluster, kind.lower(), _index(task.get("index", 0)))


def _read(cluster: dict[str, Any], kind: str, index: int) -> TfConfig:
    chiefs = next((hosts for name in _CHIEFS if (hosts := _hosts(cluster, name))), ())
    workers = _hosts(cluster, "worker")
    servers = _hosts(cluster, "ps")
    everyone = None if workers is None else (*chiefs, *workers)
    if kind in _CHIEFS:
        found = TfConfig(TfRole.WORKER, index, servers, everyone)
        known: tuple[str, ...] | None = tuple(chiefs)
    elif kind == "worker":
        found = TfConfig(TfRole.WORKER, len(chiefs) + index, servers, everyone)
        known = workers
    elif kind == "ps":
        # With dynamic workers, a server's list has only itself.
        found = TfConfig(TfRole.SERVER, index, None if workers is None else servers, everyone)
        known = found.ps_hosts
    elif kind == "evaluator":
        return TfConfig(TfRole.EVALUATOR, index, servers, everyone)
    else:
        raise _senseless(f"calls this process {plain(kind, 40)!r}, which is none of ps, worker, chief, evaluator")
    if known is not None and index >= len(known):
        raise _senseless(f"calls this process {plain(kind, 40)} {index}, but lists {len(known)} of them")
    return found


def _hosts(cluster: dict[str, Any], kind: str) -> tuple[str, ...] | None:
    """The addresses of one kind; None for a map that does not name all."""
    said = cluster.get(kind, [])
    if isinstance(said, list):
        hosts = dict(enumerate(said))
    elif isinstance(said, dict):
        hosts = {_index(key): host for key, host in said.items()}
        # A map with one entry may be all there is, or one of many.
        if len(hosts) < 2 or hosts.keys() != set(range(len(hosts))):
            return None
    else:
        raise _senseless(f"has no list of addresses for {kind}")
    if not all(isinstance(host, str) and host for host in hosts.values()):
        raise _senseless(f"has something else than addresses for {kind}")
    return tuple(hosts[number] for number in sorted(hosts))


def _index(said: object) -> int:
    text = str(said) if isinstance(said, int | str) and not isinstance(said, bool) else ""
    if not text.isascii() or not text.isdecimal() or int(text[:9]) > _MOST_INDEX:
        raise _senseless(f"has {plain(repr(said), 40)} where the index of a task belongs")
    return int(text[:9])


def _senseless(why: str) -> BadInput:
    return BadInput(f"the variable {VARIABLE} {why}; correct it, or unset it to describe the cluster by flags.")
