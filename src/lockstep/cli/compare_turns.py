"""What both kinds of ``lockstep compare`` share: turns, their progress, and a few facts about this machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.version import __version__, torch_version

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Item = TypeVar("Item")


def in_turns(rows: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Every row once in each round, with its number. Each round starts with another: none always comes first."""
    for number in range(rounds):
        begin = number % max(1, len(rows))
        for row in (*rows[begin:], *rows[:begin]):
            yield number + 1, row


def about_machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "lockstep": __version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


class TurnBar:
    """Progress: a bar on a terminal, else one line per run; on stderr, because the table is the output."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._what = ""
        self._bar: RichProgress | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )

    def __enter__(self) -> TurnBar:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begins(self, what: str) -> None:
        self._what = what
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def ended(self, how: str) -> None:
        if self._bar is not None:
            self._bar.console.print(f"{self._what}: {how}", markup=False, highlight=False, soft_wrap=True)
            self._bar.advance(self._task)
        else:
            print(f"lockstep: {self._what}: {how}", file=sys.stderr, flush=True)
