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

    def stage(self, what: str) -> None:
        """Nothing to show."""

    def warm_up(self, done: int, total: int) -> None:
        """Nothing to show."""

    def step(self, done: int, total: int, images_per_second: float) -> None:
        """Nothing to show."""

    def evaluation(self, done: int, total: int) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to end."""


class LiveBar:
    """One bar: of what the run is at, with the time left where that can be known, and the time so far otherwise."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress: RichProgress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(file=sys.stdout),
            transient=True,
        )
        self._progress.start()
        self._bars: dict[str, TaskID] = {}

    def print_above(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stage(self, what: str) -> None:
        """Something whose end cannot be foreseen."""
        self._show(what, 0, None)

    def warm_up(self, done: int, total: int) -> None:
        self._show("warm up", done, total)

    def step(self, done: int, total: int, images_per_second: float) -> None:
        self._show("training", done, total, f"{images_per_second:.1f} images/sec")

    def evaluation(self, done: int, total: int) -> None:
        """Beside the bar of the training that it interrupts, until it is done."""
        self._show("evaluation", done, total, keeps="training")
        if done >= total:
            self._progress.remove_task(self._bars.pop("evaluation"))

    def close(self) -> None:
        self._progress.stop()

    def _show(self, what: str, done: int, total: int | None, rate: str = "", keeps: str = "") -> None:
        for name in [name for name in self._bars if name not in (what, keeps)]:
            self._progress.remove_task(self._bars.pop(name))
        count = "" if total is None else f"{done}/{total}"
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=total, rate=rate, count=count)
        self._progress.update(self._bars[what], completed=done, rate=rate, count=count)
