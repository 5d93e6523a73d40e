"""Where the tasks of ``bench/chaos.py`` run: all here, or each on a host of its own, which can be lost."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.host_network import HostNetwork, run_prefix

_CLONE_NEWNET = 0x40000000
_OWN = "eye"
_PORT = 5000


class ChaosHosts:
    """All tasks on this machine, at ports that were free."""

    def addresses(self, tasks: Sequence[TaskId]) -> dict[TaskId, str]:
        return dict(zip(tasks, free_addresses(len(tasks)), strict=True))

    def prefix(self, task: TaskId) -> list[str]:  # noqa: ARG002 - all are here
        """What the command of a task begins with."""
        return []

    def unplug(self, task: TaskId) -> None:
        """Nothing reaches the host of this task any more, and nothing leaves it."""

    def plug(self, task: TaskId) -> None:
        """It has a network again."""


class NamespaceHosts(ChaosHosts):
    """Each task in a network namespace."""

    def __init__(self, network: HostNetwork, names: dict[TaskId, str], addresses: dict[TaskId, str]) -> None:
        self._network = network
        self._names = names
        self._addresses = addresses

    def addresses(self, tasks: Sequence[TaskId]) -> dict[TaskId, str]:
        return {task: f"{self._addresses[task]}:{_PORT}" for task in tasks}

    def prefix(self, task: TaskId) -> list[str]:
        return run_prefix(self._network.namespaces[self._names[task]])

    def unplug(self, task: TaskId) -> None:
        self._network.unplug(self._names[task])

    def plug(self, task: TaskId) -> None:
        self._network.plug(self._names[task])


@contextlib.contextmanager
def namespace_hosts(tasks: Sequence[TaskId]) -> Iterator[ChaosHosts]:
    """One host per task, and one for this process, which is moved there for good."""
    names = {task: f"h{number}" for number, task in enumerate(tasks)}
    addresses = {task: f"10.79.0.{number}" for number, task in enumerate(tasks, 2)}
    wanted = {name: [f"{addresses[task]}/24"] for task, name in names.items()}
    with HostNetwork({_OWN: ["10.79.0.1/24"], **wanted}) as network:
        _move_to(network.namespaces[_OWN])
        yield NamespaceHosts(network, names, addresses)


def _move_to(namespace: str) -> None:
    """This thread, and all that it starts from now on, are in this namespace."""
    with Path("/run/netns", namespace).open() as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def free_addresses(count: int) -> list[str]:
    """At random, below the ports that the kernel gives to connections: others may choose some at the same time."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    free: list[str] = []
    for port in random.SystemRandom().sample(range(10_000, max(first_of_kernel, 20_000)), 50 * count):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            free.append(f"127.0.0.1:{port}")
        if len(free) == count:
            return free
    raise RuntimeError("nearly all ports of this machine are taken")
