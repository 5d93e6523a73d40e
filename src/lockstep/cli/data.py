"""``lockstep data``: make a small data set of photo-like images, or check every record of one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import BadInput, HelpAsked

if TYPE_CHECKING:
    from lockstep.benchmark.data.checking import DataSetReport

_HELP = """\
Make or check a data set.

  lockstep data sample DIR [--pictures=400] [--files=4] [--layout=tfrecord|folders] [--seed=1234]
      makes a small ImageNet-like set of photo-like images in DIR, which must be
      empty or new: files train-*-of-* and validation-*-of-*, or folders by class

  lockstep data check DIR [--threads=N]
      checks every record of a set (TFRecords, CIFAR-10 or folders by class):
      framing, checksums, labels, and whether each image decodes

Then train on it:
  lockstep bench --data_dir=DIR --model=alexnet --batch_size=16
"""
_MOST_LISTED = 20
_MAX_PICTURES = 10_000_000


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        raise HelpAsked(_HELP)
    commands: dict[str, Callable[[list[str]], int]] = {"sample": _sample, "check": _check}
    name, *rest = words
    if any(word in ("-h", "--help") for word in rest):
        raise HelpAsked(_HELP)
    if name not in commands:
        raise BadInput(
            f"there is no 'lockstep data {name}'; use 'lockstep data sample DIR' or 'lockstep data check DIR'."
        )
    return commands[name](rest)


def _read(words: Sequence[str], command: str, known: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The one folder and the flags of a command line; ``known`` has the flags with their defaults."""
    values = dict(known)
    folders = []
    waiting = ""
    for word in words:
        if waiting:
            values[waiting], waiting = word, ""
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            if name not in known:
                raise BadInput(
                    f"'lockstep data {command}' has no flag --{name}; 'lockstep data --help' lists its flags."
                )
            if equals:
                values[name] = text
            else:
                waiting = name
        else:
            folders.append(word)
    if waiting:
        raise BadInput(f"--{waiting} needs a value; write --{waiting}={known[waiting] or 'N'}.")
    if len(folders) != 1:
        raise BadInput(f"give one folder: lockstep data {command} DIR.")
    return folders[0], values


def _whole(values: dict[str, str], name: str, least: int, most: int) -> int:
    text = values[name]
    number = int(text) if text.isdecimal() else -1
    if not least <= number <= most:
        raise BadInput(f"--{name}={text} must be a whole number from {least} to {most}.")
    return number


def _sample(words: list[str]) -> int:
    folder, values = _read(words, "sample", {"pictures": "400", "files": "4", "layout": "tfrecord", "seed": "1234"})
    from lockstep.benchmark.data.errors import BadData
    from lockstep.benchmark.data.sample import LAYOUTS, SampleSpec, make_sample

    if values["layout"] not in LAYOUTS:
        raise BadInput(f"--layout={values['layout']} is not known; use one of: {', '.join(LAYOUTS)}.")
    spec = SampleSpec(
        folder=Path(folder),
        pictures=_whole(values, "pictures", 10, _MAX_PICTURES),
        files=_whole(values, "files", 1, 1024),
        layout=values["layout"],
        seed=_whole(values, "seed", 0, (1 << 63) - 1),
    )
    with _Bar("making images") as bar:
        try:
            made = make_sample(spec, bar.update)
        except BadData as error:
            raise BadInput(str(error)) from None
    print(f"{folder}: {made.train} images for training, {made.validation} for evaluation, {len(made.classes)} classes:")
    print(f"  {', '.join(made.classes)}")
    print(f"Train on them: lockstep bench --data_dir={folder} --model=alexnet --batch_size=16")
    return 0


def _check(words: list[str]) -> int:
    cores = len(os.sched_getaffinity(0))
    folder, values = _read(words, "check", {"threads": str(cores)})
    from lockstep.benchmark.data.checking import check_set
    from lockstep.benchmark.data.errors import BadData

    threads = _whole(values, "threads", 1, 256)
    with _Bar("checking") as bar:
        try:
            report = check_set(folder, threads, lambda split, done, total: bar.update(done, total, f"checking {split}"))
        except BadData as error:
            raise BadInput(str(error)) from None
    _print_report(folder, report)
    return 0 if report.ok else 1


def _print_report(folder: str, report: DataSetReport) -> None:
    print(f"{folder}: {report.name}")
    for part in report.parts:
        print(f"  {part.split}: {part.records} records, {len(part.labels)} classes, {len(part.bad)} bad")
        for problem in part.bad[:_MOST_LISTED]:
            print(f"    bad: {problem}")
        if len(part.bad) > _MOST_LISTED:
            print(f"    and {len(part.bad) - _MOST_LISTED} more")
        for name in part.missing[:_MOST_LISTED]:
            print(f"    missing: {name}")
        if len(part.missing) > _MOST_LISTED:
            print(f"    and {len(part.missing) - _MOST_LISTED} more files are missing")
    print("The set is intact." if report.ok else "The set is damaged or incomplete.")


class _Bar:
    """A live bar on a terminal; nothing elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(self._what, total=None)
        self._progress.start()
        return self

    def update(self, done: int, total: int, what: str | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total, description=what or self._what)

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()
