"""Several hosts on one machine: network namespaces with their own addresses, joined by a bridge. Needs root.

Nothing of it is visible outside: the bridge has its own namespace, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from helpers.programs import Program

_ETC = Path("/etc/netns")


def why_not() -> str:
    """Why namespaces cannot be created here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft", "unshare", "mount", "prlimit") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    name = f"lsprobe{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False, timeout=10)
    if tried.returncode:
        return f"this machine makes no network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, timeout=10)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10, capture_output=True)


class Host:
    """One host of a network."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace

    def command(self, words: Sequence[str], before: str = "") -> list[str]:
        """``words`` as a command of this host, with its name; ``before`` is shell to run first (mounts are its own)."""
        script = f'hostname {self.name}; {before}\nexec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", *words]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None, before: str = "") -> Program:
        return Program(self.command(words, before), environment)

    def hosts_file(self, text: str) -> None:
        """Set /etc/hosts on this host, beside localhost."""
        folder = _ETC / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}\n")
        (folder / "resolv.conf").write_text("")
        (folder / "nsswitch.conf").write_text("hosts: files\n")

    def firewall(self, *rules: str) -> None:
        """Add these nft rules to the input chain, for example ``ip saddr 1.2.3.4 drop``."""
        text = "flush ruleset\ntable inet wall {\n chain input {\n type filter hook input priority 0;\n"
        text += "\n".join(rules) + "\n}\n}\n"
        command = ["ip", "netns", "exec", self.namespace, "nft", "-f", "-"]
        subprocess.run(command, input=text, text=True, check=True, timeout=10, capture_output=True)

    def reset(self) -> None:
        """Remove the firewall, and restore the names."""
        command = ["ip", "netns", "exec", self.namespace, "nft", "flush", "ruleset"]
        subprocess.run(command, check=True, timeout=10, capture_output=True)
        self.hosts_file("")


class Network:
    """Hosts by name, each with its addresses (with prefix length), on one bridge."""

    def __init__(self, hosts: Mapping[str, Sequence[str]]) -> None:
        self._tag = f"ls{os.getpid()}"
        self._switch = f"{self._tag}sw"
        self.hosts = {name: Host(name, f"{self._tag}{name}") for name in hosts}
        self._addresses = hosts

    def __enter__(self) -> Network:
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
        for number, (name, host) in enumerate(self.hosts.items()):
            inside, outside = f"i{number}", f"o{number}"
            _ip("netns", "add", host.namespace)
            _ip("-n", self._switch, "link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("-n", self._switch, "link", "set", inside, "netns", host.namespace)
            _ip("-n", self._switch, "link", "set", outside, "master", "br0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", inside, "up")
            for address in self._addresses[name]:
                extra = ["nodad"] if ":" in address else []
                _ip("-n", host.namespace, "addr", "add", address, "dev", inside, *extra)
            host.hosts_file("")

    def close(self) -> None:
        for namespace in (*(host.namespace for host in self.hosts.values()), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=10, capture_output=True)
            shutil.rmtree(_ETC / namespace, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
