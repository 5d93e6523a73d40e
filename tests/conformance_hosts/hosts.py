"""Where the suite starts the nodes that it kills and freezes (``stage.NodeHosts``)."""

from __future__ import annotations

import socket
from typing import Final, cast

from conformance_hosts.forks import Forks
from conformance_hosts.processes import ForkedProcess, HostedProcess, LocalProcess, NodeProcess
from conformance_hosts.remote import RemoteNode
from lockstep.transports.conformance.events import PATIENCE
from lockstep.transports.conformance.stage import RemoteVictim

LOOPBACK: Final = "127.0.0.1"


def _victim(task: str, incarnation: int, process: NodeProcess) -> RemoteVictim:
    return cast(RemoteVictim, RemoteNode(task, incarnation, process))  # it forwards what it does not have itself


class Here:
    """Each node is a child of this process, with its own Python."""

    elsewhere = False
    own_address = LOOPBACK

    def start(self, transport: str, task: str, incarnation: int) -> RemoteVictim:
        return _victim(task, incarnation, LocalProcess(transport, task, incarnation))


class Forked:
    """Each node is forked on this machine, which starts it faster."""

    elsewhere = False
    own_address = LOOPBACK

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def start(self, transport: str, task: str, incarnation: int) -> RemoteVictim:
        return _victim(task, incarnation, ForkedProcess(self._forks, transport, task, incarnation))


class There:
    """A node host on another machine (``node_host.py``) starts the nodes."""

    elsewhere = True

    def __init__(self, address: str) -> None:
        """OSError if ``address`` (HOST:PORT) cannot be reached."""
        self._address = address
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as probe:
            self.own_address = str(probe.getsockname()[0])

    def start(self, transport: str, task: str, incarnation: int) -> RemoteVictim:
        return _victim(task, incarnation, HostedProcess(self._address, transport, task, incarnation))
