"""Several hosts on one machine: network namespaces on one bridge, and ways to break what lies between them.

Needs root, ``ip`` (iproute2) and, to break something, ``nft`` (nftables). ``why_not`` names what is missing. Nothing
is visible outside: the bridge is in its own namespace, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Self

from lockstep.protocol.core.ids import TaskId

PROGRAMS: Final = MappingProxyType({"ip": "iproute2", "nft": "nftables"})
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


class HostsError(Exception):
    """A command that makes or breaks the network failed; the text names it."""


def why_not(programs: Mapping[str, str] = PROGRAMS) -> str:
    """Why this machine cannot make hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in programs.items():
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    probe = f"lsprobe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
    except HostsError as error:
        return f"this kernel or container does not allow network namespaces: {error}"
    _ip("netns", "del", probe)
    return ""


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Sequence[str], given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")


def run_prefix(namespace: str) -> list[str]:
    """How to run a command in this namespace."""
    return ["ip", "netns", "exec", namespace]


def set_firewall(namespace: str, *rules: str) -> None:
    """Filter what arrives in this namespace by these nft rules alone, for example ``ip saddr 1.2.3.4 drop``."""
    chain = "table inet wall {\nchain arriving {\ntype filter hook input priority 0;\n" + "\n".join(rules) + "\n}\n}\n"
    _run([*run_prefix(namespace), "nft", "-f", "-"], "flush ruleset\n" + (chain if rules else ""))


class HostNetwork:
    """Hosts by name, each with its addresses (with prefix length), on one bridge. Use it in a ``with`` block."""

    def __init__(self, hosts: Mapping[str, Sequence[str]]) -> None:
        tag = f"ls{os.getpid()}"
        self._switch = f"{tag}sw"
        self.namespaces = {name: f"{tag}{name}" for name in hosts}
        self._addresses = hosts

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number, (name, namespace) in enumerate(self.namespaces.items()):
            inside, outside = f"i{number}", f"o{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", inside, "netns", namespace, "type", "veth",
                "peer", "name", outside, "netns", self._switch)  # fmt: skip
            _ip("-n", self._switch, "link", "set", outside, "master", "br0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", inside, "up")
            for address in self._addresses[name]:
                extra = ["nodad"] if ":" in address else []
                _ip("-n", namespace, "addr", "add", address, "dev", inside, *extra)

    def close(self) -> None:
        for namespace in (*self.namespaces.values(), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False, timeout=10)

    def __exit__(self, *_: object) -> None:
        self.close()


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
