"""Hosts on one machine (``lockstep.runtime.host_network``), with their own names, files and programs. Needs root."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from helpers.programs import Program
from lockstep.drill import hosts as drill_hosts
from lockstep.runtime import host_network

_ETC = Path("/etc/netns")
_MORE_PROGRAMS = {"unshare": "util-linux", "mount": "mount", "prlimit": "util-linux"}


def why_not() -> str:
    """Why such hosts cannot be made here; empty if they can."""
    return host_network.why_not({**drill_hosts.PROGRAMS, **_MORE_PROGRAMS})


class Host:
    """One host of a network."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace

    def command(self, words: Sequence[str], before: str = "") -> list[str]:
        """``words`` as a command of this host, with its name; ``before`` is shell to run first (mounts are its own)."""
        script = f'hostname {self.name}; {before}\nexec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", *words]
        return [*host_network.run_prefix(self.namespace), *inside]

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None, before: str = "") -> Program:
        return Program(self.command(words, before), environment)

    def hosts_file(self, text: str) -> None:
        """Set /etc/hosts on this host, in addition to localhost."""
        folder = _ETC / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}\n")
        (folder / "resolv.conf").write_text("")
        (folder / "nsswitch.conf").write_text("hosts: files\n")

    def firewall(self, *rules: str) -> None:
        drill_hosts.set_firewall(self.namespace, *rules)

    def reset(self) -> None:
        """Remove the firewall and restore the names."""
        self.firewall()
        self.hosts_file("")


class Network(host_network.HostNetwork):
    """Hosts by name, each with its addresses (with prefix length), on one bridge."""

    def __init__(self, hosts: Mapping[str, Sequence[str]]) -> None:
        super().__init__(hosts)
        self.hosts = {name: Host(name, namespace) for name, namespace in self.namespaces.items()}

    def __enter__(self) -> Self:
        for host in self.hosts.values():
            host.hosts_file("")
        return super().__enter__()

    def close(self) -> None:
        super().close()
        for namespace in self.namespaces.values():
            shutil.rmtree(_ETC / namespace, ignore_errors=True)
