"""How many of the machine's cores this process may use: its affinity, and the limits of its control groups."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cgroup_folders(cgroup: Path = CGROUP, own_cgroup: Path = OWN_CGROUP) -> list[Path]:
    """The folders of our cgroup and of its ancestors: each of them limits us (version 2 only)."""
    own = re.search(r"^0::(/.*)$", read_if_there(own_cgroup), re.MULTILINE)
    path = own[1].strip("/") if own else ""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [cgroup.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def usable_cores(groups: Sequence[Path]) -> float:
    """The cores of this process's affinity, or less where one of these control groups has a quota."""
    count = float(len(os.sched_getaffinity(0)))
    for group in groups:
        quota = re.fullmatch(r"(\d+) (\d+)\s*", read_if_there(group / "cpu.max"))
        if quota and int(quota[2]):
            count = min(count, int(quota[1]) / int(quota[2]))
    return count


def read_if_there(path: Path) -> str:
    """A small file of the kernel; empty if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
