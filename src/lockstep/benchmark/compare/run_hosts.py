"""Where the programs of a run are: all on this machine, or each on a host of its own (``--hosts=namespaces``).

Hosts are network namespaces on one bridge, made anew for every run. They share processors and memory, but no interface:
what travels between two of them crosses TCP, for every contestant alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lockstep.runtime.host_network import HostNetwork, run_prefix

NAMESPACES: Final = "namespaces"
_NETWORK: Final = "10.78.0"
_PORT: Final = 5000


@dataclass(frozen=True, slots=True)
class RunHost:
    """One host: its address, its interface, and how a command is run there."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    prefix: tuple[str, ...] = ()


HERE: Final = RunHost()


@dataclass(frozen=True, slots=True)
class RunHosts:
    """The hosts of a run; without any, everything is on this machine."""

    servers: tuple[RunHost, ...] = ()
    workers: tuple[RunHost, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.workers)

    def worker(self, index: int) -> RunHost:
        return self.workers[index] if self.workers else HERE

    def beside(self) -> RunHosts:
        """The same workers, with a server on the host of each."""
        return RunHosts(self.workers, self.workers)

    def server_addresses(self) -> list[str]:
        return [f"{host.address}:{_PORT}" for host in self.servers]

    def worker_addresses(self) -> list[str]:
        """Another port than a server's: both may be on one host."""
        return [f"{host.address}:{_PORT + 1}" for host in self.workers]


@contextlib.contextmanager
def made_hosts(servers: int, workers: int) -> Iterator[RunHosts]:
    """One host for each server and each worker, gone after the block. ``HostsError`` if that does not work."""
    names = [*(f"s{index}" for index in range(servers)), *(f"w{index}" for index in range(workers))]
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
    with HostNetwork({name: [f"{address}/24"] for name, address in addresses.items()}) as network:
        hosts = tuple(
            RunHost(addresses[name], network.interface(name), tuple(run_prefix(network.namespaces[name])))
            for name in names
        )
        yield RunHosts(hosts[:servers], hosts[servers:])
