"""Evidence of the kernel's out-of-memory killer: counters that it raises, read before and after a death."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SAMPLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Counter:
    """One ``oom_kill`` counter: its file, and what it counts."""

    path: Path
    scope: str

    def read(self) -> int | None:
        try:
            lines = self.path.read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdecimal():
                return int(value)
        return None


def find_counters(root: Path = Path("/")) -> list[Counter]:
    """The counters of this process's control group (version 2 or 1) and of the whole machine, the narrowest first."""
    found: list[Counter] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            candidates: Iterable[Path] = _group_files(root / "sys/fs/cgroup", path, "memory.events")
        elif "memory" in controllers.split(","):
            candidates = _group_files(root / "sys/fs/cgroup/memory", path, "memory.oom_control")
        else:
            continue
        for candidate in candidates:
            found.append(Counter(candidate, "in this task's memory control group"))
    found.append(Counter(root / "proc/vmstat", "on this machine"))
    return [counter for counter in found if counter.read() is not None]


def _group_files(mount: Path, group: str, name: str) -> list[Path]:
    """The group's own file, or the one at the mount: inside a container the given path is often that of the host."""
    inside = mount / group.lstrip("/") / name
    return [inside if inside.exists() else mount / name]


class OomWitness:
    """Remembers the counters of the last second or two, so that a kill long ago is not taken for this one."""

    def __init__(self, counters: list[Counter], now: float) -> None:
        self._counters = counters
        self._recent = self._older = self._read()
        self._sampled_at = now

    def sample(self, now: float) -> None:
        """Call often; reads at most once per second."""
        if now - self._sampled_at >= _SAMPLE_SECONDS:
            self._older, self._recent, self._sampled_at = self._recent, self._read(), now

    def evidence(self) -> str | None:
        """A phrase if a counter has risen since the sample before the last."""
        for counter, before, now in zip(self._counters, self._older, self._read(), strict=True):
            if now > before:
                kills = "one out-of-memory kill" if now == before + 1 else f"{now - before} out-of-memory kills"
                return f"{counter.path} counts {kills} {counter.scope} just now"
        return None

    @property
    def readable(self) -> bool:
        """Whether there is any counter at all."""
        return bool(self._counters)

    def _read(self) -> list[int]:
        return [counter.read() or 0 for counter in self._counters]
