"""Whether a process is frozen together with its control group, as containers are paused.

The kernel then shows it as sleeping, or in a system call, and not as stopped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from lockstep.runtime.processes import ProcessFacts, process_facts

FROZEN: Final = "frozen with its control group"
_GROUPS: Final = Path("/sys/fs/cgroup")


def task_facts(pid: int) -> ProcessFacts | None:
    """``process_facts``, where a process in a frozen group counts as stopped."""
    facts = process_facts(pid)
    if facts is None or facts.stopped or facts.dead or not is_frozen(pid):
        return facts
    return replace(facts, state=FROZEN, stopped=True)


def is_frozen(pid: int, groups: Path = _GROUPS) -> bool:
    """Whether the freezer of either version of control groups holds the process; False where it cannot be seen."""
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        kind, _, path = rest.partition(":")
        group = path.lstrip("/")
        if "freezer" in kind.split(",") and _read(groups / "freezer" / group / "freezer.state").strip() == "FROZEN":
            return True
        if number == "0" and any(_says_frozen(root / group) for root in (groups, groups / "unified")):
            return True
    return False


def _says_frozen(group: Path) -> bool:
    return ["frozen", "1"] in [line.split() for line in _read(group / "cgroup.events").splitlines()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
