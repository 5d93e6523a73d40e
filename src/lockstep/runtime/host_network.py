"""Several hosts on one machine: network namespaces on one bridge.

Needs root and ``ip`` (iproute2). ``why_not`` names what is missing. Nothing is visible outside: the bridge is in its
own namespace, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Self

PROGRAMS: Final = MappingProxyType({"ip": "iproute2"})
"""What this needs, and the Debian package that has it."""


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
        ip("netns", "add", probe)
    except HostsError as error:
        return f"this kernel or container does not allow network namespaces: {error}"
    ip("netns", "del", probe)
    return ""


def ip(*words: str) -> None:
    run_command(["ip", *words])


def run_command(command: Sequence[str], given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")


def run_prefix(namespace: str) -> list[str]:
    """How to run a command in this namespace."""
    return ["ip", "netns", "exec", namespace]


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
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for name, namespace in self.namespaces.items():
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            self.plug(name)

    def plug(self, name: str) -> None:
        """Give this host its interface, with its addresses."""
        inside, namespace = self.interface(name), self.namespaces[name]
        outside = f"o{inside[1:]}"
        ip("link", "add", inside, "netns", namespace, "type", "veth",
            "peer", "name", outside, "netns", self._switch)  # fmt: skip
        ip("-n", self._switch, "link", "set", outside, "master", "br0", "up")
        ip("-n", namespace, "link", "set", inside, "up")
        for address in self._addresses[name]:
            extra = ["nodad"] if ":" in address else []
            ip("-n", namespace, "addr", "add", address, "dev", inside, *extra)

    def unplug(self, name: str) -> None:
        """Take it away: nothing leaves this host any more, not even the end of a connection."""
        ip("-n", self.namespaces[name], "link", "del", self.interface(name))

    def interface(self, name: str) -> str:
        """What the host of this name calls its interface."""
        return f"i{list(self.namespaces).index(name)}"

    def close(self) -> None:
        for namespace in (*self.namespaces.values(), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False, timeout=10)

    def __exit__(self, *_: object) -> None:
        self.close()
