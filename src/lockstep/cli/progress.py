"""What a run shows: lines as they happen, and on a terminal a live bar below them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lockstep.terminal import clear_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Output:
    """The chief's lines. On anything but a terminal they go out exactly as they are, flushed one by one."""

    def __init__(self) -> None:
        self._bar: LiveBar | None = None

    def emit(self, line: str) -> None:
        if self._bar is not None:
            self._bar.print_above(line)
        else:
            print(f"{clear_line(sys.stdout.isatty())}{line}", flush=True)

    def make_progress(self) -> LiveBar | NoBar:
        """The bar of a run; call it once."""
        if not sys.stdout.isatty():
            return NoBar()
        self._bar = LiveBar()
        return self._bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class NoBar:
    """Without a terminal there is no bar: the step lines suffice."""

    def warm_up(self, done: int, total: int) -> None:
        """Nothing to show."""

    def step(self, done: int, total: int, images_per_second: float) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to end."""


class LiveBar:
    """A bar of warm-up steps, then of timed steps with the rate."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: RichProgress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(file=sys.stdout),
            transient=True,
        )
        self._progress.start()
        self._warm_up: TaskID | None = None
        self._steps: TaskID | None = None

    def print_above(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warm_up(self, done: int, total: int) -> None:
        if self._warm_up is None:
            self._warm_up = self._progress.add_task("warm up", total=total, rate="")
        self._progress.update(self._warm_up, completed=done)

    def step(self, done: int, total: int, images_per_second: float) -> None:
        if self._steps is None:
            if self._warm_up is not None:
                self._progress.remove_task(self._warm_up)
            self._steps = self._progress.add_task("training", total=total, rate="")
        self._progress.update(self._steps, completed=done, rate=f"{images_per_second:.1f} images/sec")

    def close(self) -> None:
        self._progress.stop()
