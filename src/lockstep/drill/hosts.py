"""Hosts of their own for the tasks of a drill: network namespaces on one bridge, and ways to break what lies between.

Needs root, ``ip`` (iproute2) and, to break something, ``nft`` (nftables). ``why_not`` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from lockstep.protocol.ids import TaskId

_NETWORK = "10.77.0"
SLOW_KBYTES = 60
"""A slow link lets this many kilobytes through in a second."""


class HostsError(Exception):
    """A command that makes or breaks the network failed; the text says which."""


def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    probe = f"lsprobe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False, timeout=10)
    if done.returncode != 0:
        return "this kernel or container does not let us make network namespaces"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False, timeout=10)
    return ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=10)
    if done.returncode != 0:
        raise HostsError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """One namespace a task, on one bridge. Leave the ``with`` block and all of it is gone."""

    def __init__(self, tasks: Sequence[TaskId]) -> None:
        self._tag = f"ls{os.getpid() % 100000}"
        self._names = {task: f"{self._tag}n{index}" for index, task in enumerate(tasks)}
        self.addresses = {task: f"{_NETWORK}.{index + 1}" for index, task in enumerate(tasks)}

    def __enter__(self) -> Hosts:
        switch = f"{self._tag}sw"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for index, (task, name) in enumerate(self._names.items()):
                _ip("netns", "add", name)
                _ip("link", "add", f"{self._tag}v{index}", "netns", name, "type", "veth",
                    "peer", "name", f"p{index}", "netns", switch)  # fmt: skip
                _ip("-n", name, "addr", "add", f"{self.addresses[task]}/24", "dev", f"{self._tag}v{index}")
                _ip("-n", name, "link", "set", f"{self._tag}v{index}", "up")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", switch, "link", "set", f"p{index}", "master", "br0")
                _ip("-n", switch, "link", "set", f"p{index}", "up")
        except HostsError:
            self.close()
            raise
        return self

    def run_prefix(self, task: TaskId) -> list[str]:
        """How to run a command on the host of this task."""
        return ["ip", "netns", "exec", self._names[task]]

    def drop(self, at: TaskId, source: TaskId, *, slow: bool = False) -> None:
        """Drop what comes from ``source`` to the host of ``at``; ``slow``: only what is above a low rate."""
        limit = f"limit rate over {SLOW_KBYTES} kbytes/second burst 64 kbytes " if slow else ""
        rules = (
            "table inet drill {\nchain arriving {\ntype filter hook input priority 0;\n"
            f"ip saddr {self.addresses[source]} {limit}drop\n}}\n}}\n"
        )
        command = [*self.run_prefix(at), "nft", "-f", "-"]
        done = subprocess.run(command, input=rules, capture_output=True, text=True, check=False, timeout=10)
        if done.returncode != 0:
            raise HostsError(f"nft: {done.stderr.strip()}")

    def close(self) -> None:
        for name in (*self._names.values(), f"{self._tag}sw"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=10)

    def __exit__(self, *_: object) -> None:
        self.close()
