"""Where the tasks of a job listen, what for, and what a caller must prove there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Any, Final

from lockstep.protocol.core.ids import CHIEF, TaskId
from lockstep.runtime.listening import ListeningSocket
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.metrics_options import is_loopback, number_on_host
from lockstep.security.chosen import is_insecure
from lockstep.transports.control.addresses import Address, parse_address

_MOST_SHOWN: Final = 4


class ListenerPurpose(StrEnum):
    """What a socket is for; the value is shown."""

    MONITOR = "monitor"
    TASK = "task"
    TENSORS = "tensors"
    STORE = "torch's store"
    COLLECTIVE = "gloo or NCCL"
    UCX = "UCX"
    VERBS = "RDMA"
    METRICS = "metrics"
    UNKNOWN = "unknown"


class CallerProof(StrEnum):
    """What a caller must show before it is served."""

    KEY = "the job's key"
    THIS_HOST = "that it is on this host"
    NOTHING = "nothing"


_ASKS: Final = frozenset(
    {ListenerPurpose.MONITOR, ListenerPurpose.TASK, ListenerPurpose.TENSORS, ListenerPurpose.METRICS}
)


@dataclass(frozen=True, slots=True)
class ListeningPlace:
    """One place at which a task listens, or will."""

    task: str
    address: str
    ports: str
    """A port; before the start ``4700-4799``, or ``*`` where the kernel will choose. Empty for RDMA, which has none."""
    purpose: ListenerPurpose

    @property
    def proof(self) -> CallerProof:
        if self.purpose is ListenerPurpose.METRICS and is_loopback(Address(self.address, 0)):
            return CallerProof.THIS_HOST
        return CallerProof.KEY if self.purpose in _ASKS and not is_insecure() else CallerProof.NOTHING

    @property
    def everywhere(self) -> bool:
        try:
            return ip_address(self.address).is_unspecified
        except ValueError:
            return False  # a name

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.ports} ({self.purpose})" if self.ports else f"{host} ({self.purpose})"

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "address": self.address,
            "port": self.ports,
            "purpose": self.purpose.name.lower(),
            "proof": self.proof.name.lower(),
        }


@dataclass(frozen=True, slots=True)
class Openings:
    """What only the command line and the machine tell about a job."""

    store_port: int = 0
    """Where worker 0 keeps torch's store, in a mode without servers."""
    rdma: bool = False
    """Whether the transport that was asked for uses RDMA here."""

    def without_socket(self, task: TaskId, host: str) -> list[ListeningPlace]:
        return [ListeningPlace(str(task), host, "", ListenerPurpose.VERBS)] if self.rdma else []


@dataclass(frozen=True, slots=True)
class RunningTask:
    """What a running task's monitor says about it."""

    pids: tuple[int, ...]
    address: str
    """Where the task itself listens, which its monitor reveals."""


def planned_listeners(spec: ClusterSpec, task: TaskId, job: Openings) -> list[ListeningPlace]:
    """Where a task will listen."""
    listen = spec.for_task(task).listen_address()
    ports = "*" if spec.second_ports is None else str(spec.second_ports)
    wanted = [(str(listen.port), ListenerPurpose.MONITOR), (ports, ListenerPurpose.TASK)]
    if spec.carried_by_torch:
        wanted += [(str(job.store_port), ListenerPurpose.STORE)] if task == CHIEF else []
        wanted.append(("*", ListenerPurpose.COLLECTIVE))
    elif spec.protocol == "grpc+ucx":
        wanted.append((ports, ListenerPurpose.UCX))
    elif _has_port_for_tensors(spec):
        wanted.append((ports, ListenerPurpose.TENSORS))
    places = [ListeningPlace(str(task), listen.host, which, purpose) for which, purpose in wanted]
    if (metrics := _metrics_address(spec, task)) is not None:
        places.append(ListeningPlace(str(task), metrics.host, str(metrics.port), ListenerPurpose.METRICS))
    return places + job.without_socket(task, listen.host)


def _metrics_address(spec: ClusterSpec, task: TaskId) -> Address | None:
    if not spec.metrics.port:
        return None
    return spec.metrics.address(number_on_host(str(task), spec.all_addresses()))


def found_listeners(
    spec: ClusterSpec, task: TaskId, job: Openings, running: RunningTask, sockets: Iterable[ListeningSocket]
) -> list[ListeningPlace]:
    """Where a running task listens, from the sockets that its processes have."""
    listen = spec.for_task(task).listen_address()
    known = {listen.port: ListenerPurpose.MONITOR}
    if (metrics := _metrics_address(spec, task)) is not None:
        known[metrics.port] = ListenerPurpose.METRICS
    if running.address:
        known[parse_address(running.address).port] = ListenerPurpose.TASK
    other = ListenerPurpose.UCX if spec.protocol == "grpc+ucx" else ListenerPurpose.UNKNOWN
    if spec.carried_by_torch:
        other = ListenerPurpose.COLLECTIVE
        if task == CHIEF:
            known[job.store_port] = ListenerPurpose.STORE
    listening = list(sockets)
    if other is ListenerPurpose.UNKNOWN and sum(one.port not in known for one in listening) == 1:
        other = ListenerPurpose.TENSORS if _has_port_for_tensors(spec) else ListenerPurpose.UNKNOWN
    places = [ListeningPlace(str(task), one.address, str(one.port), known.get(one.port, other)) for one in listening]
    return places + job.without_socket(task, listen.host)


def _has_port_for_tensors(spec: ClusterSpec) -> bool:
    """Whether tensors have a port of their own, which nobody but the peers is told. Those over gRPC use that of the
    links if they are encrypted, and without a key."""
    in_the_clear = not spec.require_private and not is_insecure()
    return spec.protocol in ("auto", "grpc+tcp") or (spec.protocol == "grpc" and in_the_clear)


def posture_lines(listeners: Iterable[ListeningPlace]) -> list[str]:
    """A line per task, and what to know about those that serve anybody."""
    by_task: dict[str, list[ListeningPlace]] = {}
    for one in listeners:
        by_task.setdefault(one.task, []).append(one)
    shown = list(by_task.items())[:_MOST_SHOWN]
    lines = [f"{TaskId.parse(task).short} listens at {', '.join(map(str, places))}" for task, places in shown]
    if len(by_task) > len(shown):
        lines.append(f"{len(by_task) - len(shown)} more tasks listen on this machine; --json lists them")
    every = [one for places in by_task.values() for one in places]
    open_to_all = dict.fromkeys(one.purpose.value for one in every if one.proof is CallerProof.NOTHING)
    if open_to_all:
        lines.append(
            f"note: {' and '.join(open_to_all)} cannot check who connects; let only the hosts of this job reach "
            "them (docs/security.md)."
        )
    if any(one.everywhere for one in every):
        lines.append("note: --bind makes a task listen on every interface; give the address of one of them instead.")
    return lines
