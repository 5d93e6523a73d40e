"""The hosts of a drill (``runtime/host_network.py``), and ways to break what lies between them.

To break something needs ``nft`` (nftables) besides; ``why_not`` names what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from lockstep.protocol.core.ids import TaskId
from lockstep.runtime import host_network
from lockstep.runtime.host_network import HostNetwork, run_command, run_prefix

PROGRAMS: Final = MappingProxyType({**host_network.PROGRAMS, "nft": "nftables"})
"""What this needs, and the Debian package that has it."""
SLOW_KBYTES: Final = 60
"""A slow link passes this many kilobytes per second."""
LARGE_BYTES: Final = 1000
"""Packets above this size vanish where the drill is about large ones: less than Ethernet's, more than a heartbeat."""
_NETWORK: Final = "10.77.0"
PACKETS: Final = MappingProxyType(
    {
        "slow": f"limit rate over {SLOW_KBYTES} kbytes/second burst 64 kbytes drop",
        "large": f"meta length > {LARGE_BYTES} drop",
        "reset": "meta l4proto tcp reject with tcp reset",
    }
)
"""What happens to packets, as nft says it; for any other word all are dropped."""


def why_not() -> str:
    """Why this machine cannot make such hosts; empty if it can."""
    return host_network.why_not(PROGRAMS)


def set_firewall(namespace: str, *rules: str) -> None:
    """Filter what arrives in this namespace by these nft rules alone, for example ``ip saddr 1.2.3.4 drop``."""
    chain = "table inet wall {\nchain arriving {\ntype filter hook input priority 0;\n" + "\n".join(rules) + "\n}\n}\n"
    run_command([*run_prefix(namespace), "nft", "-f", "-"], "flush ruleset\n" + (chain if rules else ""))


class Hosts(HostNetwork):
    """One host per task of a drill."""

    def __init__(self, tasks: Sequence[TaskId]) -> None:
        self.addresses = {task: f"{_NETWORK}.{index}" for index, task in enumerate(tasks, 1)}
        self._names = {task: f"n{index}" for index, task in enumerate(tasks, 1)}
        super().__init__({self._names[task]: [f"{address}/24"] for task, address in self.addresses.items()})

    def run_prefix(self, task: TaskId) -> list[str]:
        """How to run a command on the host of this task."""
        return run_prefix(self.namespaces[self._names[task]])

    def drop(self, at: TaskId, source: TaskId, how: str = "") -> None:
        """Drop what comes from ``source`` to the host of ``at``: all of it, or only what ``how`` is about."""
        set_firewall(self.namespaces[self._names[at]], f"ip saddr {self.addresses[source]} {PACKETS.get(how, 'drop')}")

    def restore(self, at: TaskId) -> None:
        """Let everything pass to the host of ``at`` again."""
        set_firewall(self.namespaces[self._names[at]])
