"""What ``lockstep dashboard`` and ``lockstep top`` are asked to watch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import BadInput
from lockstep.security.chosen import settle
from lockstep.terminal import say

if TYPE_CHECKING:
    from lockstep.dashboard.sources import LookSource
    from lockstep.sim.faults import AnyFault

MOST_SIMULATED = 10_000
_WORKERS_OF_A_SERVER = 500

WHAT_HELP = """\
  (nothing)                  your job on this host
  HOST:PORT                  the cluster that this task belongs to (any task will do)
  FOLDER                     the run folder of a job that has ended
  --simulate=TASKS           a simulated cluster of this many tasks
  --fault=JSON               plant this in the simulated cluster (docs/simulator.md)
"""


@dataclass(slots=True)
class WatchTarget:
    """The words of a command line that say what is watched; ``rest``: its other flags, by name."""

    target: str = ""
    simulated: int = 0
    faults: list[str] = field(default_factory=list)
    rest: dict[str, str] = field(default_factory=dict)

    def source(self, command: str) -> LookSource:
        """What is looked at; BadInput if it cannot be."""
        if self.simulated:
            return self._simulated()
        from lockstep.dashboard.sources import LiveCluster, RunFolderFiles

        if not self.target:
            settle(say)
            return LiveCluster(_only_job(command), command)
        if _is_address(self.target):
            settle(say)
            return LiveCluster(self.target, command)
        if not Path(self.target).is_dir():
            raise BadInput(f"{self.target} is neither an address like HOST:PORT nor a folder; give one of the two.")
        files = RunFolderFiles(Path(self.target))
        for problem in files.problems:
            say(problem)
        return files

    def _simulated(self) -> LookSource:
        from lockstep.dashboard.simulated import SimulatedCluster

        servers = max(1, self.simulated // _WORKERS_OF_A_SERVER)
        try:
            return SimulatedCluster(self.simulated - servers, servers, self._faults())
        except ValueError as error:
            raise BadInput(f"--fault cannot be planted: {error}.") from error

    def _faults(self) -> list[AnyFault]:
        from lockstep.sim.faults import parse_fault

        return [parse_fault(text) for text in self.faults]


def parse_watched(argv: Sequence[str], command: str, flags: Sequence[str]) -> WatchTarget:
    """Parse a command line; ``flags``: what the command has besides, each with a value."""
    asked = WatchTarget()
    for word in argv:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            if asked.target:
                raise BadInput(f"'{command}' takes one address or one folder; any task of the cluster will do.")
            asked.target = word
        elif name not in ("simulate", "fault", *flags):
            known = ", ".join(f"--{one}" for one in ("simulate", "fault", *flags))
            raise BadInput(f"'{command}' has no flag {word!r}; it has {known}.")
        elif not value:
            raise BadInput(f"--{name} needs a value; write --{name}=VALUE.")
        elif name == "simulate":
            asked.simulated = whole_number(name, value, 2, MOST_SIMULATED)
        elif name == "fault":
            asked.faults.append(value)
        else:
            asked.rest[name] = value
    if asked.simulated and asked.target:
        raise BadInput("give --simulate, or an address or folder; not both.")
    if asked.faults and not asked.simulated:
        raise BadInput("--fault is planted in a simulated cluster; give --simulate too, or use 'lockstep drill'.")
    return asked


def whole_number(name: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise BadInput(f"--{name}={text} must be a whole number from {low} to {high}.")
    return int(text)


def _is_address(target: str) -> bool:
    host, _, port = target.rpartition(":")
    return bool(host) and os.sep not in target and port.isdecimal()


def _only_job(command: str) -> str:
    """The address of the caller's only job on this host."""
    from lockstep.runtime.running_jobs import running_jobs

    jobs = running_jobs()
    if not jobs:
        raise BadInput(
            f"no job of yours runs on this host; write '{command} HOST:PORT' with the address of any task, or give "
            "the folder of a run that has ended."
        )
    if len(jobs) > 1:
        rows = [f"{command} {job.address}    {len(job.cluster)} tasks" for job in jobs]
        raise BadInput([f"{len(jobs)} jobs of yours run on this host; watch one of them:", *rows])
    return jobs[0].address
