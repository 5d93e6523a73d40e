"""The half of ``lockstep sim`` that plays runs with faults: many seeds, or one of them again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.cli.sim import SimRequest
from lockstep.errors import BadInput
from lockstep.sim.explore import Played, play_seed
from lockstep.sim.faults import AnyFault, parse_fault, to_fields, to_text
from lockstep.sim.generate import Size
from lockstep.sim.pool import parallel
from lockstep.sim.scenario import Mishap
from lockstep.sim.shrink import Recipe, Shrinker

SHOWN_FAILURES = 3


@dataclass(slots=True)
class Tally:
    """How all runs ended."""

    size: Size
    runs: int = 0
    virtual_seconds: float = 0.0
    longest: float = 0.0
    events: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    slowest_verdict: float = 0.0
    failures: list[Played] = field(default_factory=list)

    def add(self, played: Played) -> None:
        self.runs += 1
        self.virtual_seconds += played.seconds
        self.longest = max(self.longest, played.seconds)
        self.events += played.events
        self.struck.update(type(fault).__name__ for fault in played.struck)
        if played.ending is None:
            self.failures.append(played)
        else:
            self.endings["completed" if played.ending.completed else f"verdict: {played.ending.cause}"] += 1
            self.slowest_verdict = max(self.slowest_verdict, played.ending.still)


def run_search(asked: SimRequest) -> int:
    """Play the requested runs; returns the exit code."""
    size = Size(asked.whole("workers", 8), asked.servers(2, least=0), asked.whole("steps", 3))
    faults = _faults(asked)
    if "seed" in asked.numbers:
        return _run_one(asked, size, faults)
    return _run_many(asked, size, faults)


def _faults(asked: SimRequest) -> tuple[AnyFault, ...] | None:
    given = asked.texts.get("fault")
    if given is None:
        return None
    try:
        return tuple(parse_fault(text) for text in given if text != "none")
    except ValueError as error:
        raise BadInput(f"--fault: {error}.") from error


def _mishaps(asked: SimRequest) -> tuple[Mishap, ...] | None:
    given = asked.texts.get("mishap")
    if given is None:
        return None
    try:
        return tuple(Mishap.parse(text) for text in given if text != "none")
    except ValueError as error:
        raise BadInput(f"--mishap: {error}.") from error


# -- one run --


def _run_one(asked: SimRequest, size: Size, faults: tuple[AnyFault, ...] | None) -> int:
    seed, mishaps = asked.whole("seed", 0), _mishaps(asked)
    try:
        if mishaps is None:
            played = play_seed(seed, size, faults)
        else:
            drawn = faults if faults is not None else play_seed(seed, size).faults
            played = Recipe(seed, size, drawn, mishaps).play()
    except ValueError as error:
        raise BadInput(f"--fault: {error}.") from error
    _write(asked, _one_as_json(played), _one_as_text(played))
    return 0 if played.sound else 1


def _one_as_text(played: Played) -> str:
    lines = [f"seed {played.seed}: {played.events} events in {played.seconds:.1f} virtual seconds"]
    lines += [
        f"  planted  {to_text(fault)}{'' if fault in played.struck else '  (did not strike)'}"
        for fault in played.faults
    ]
    kinds = Counter(mishap.kind for mishap in played.mishaps)
    lines.append("  network  " + (", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "fair"))
    if not played.sound:
        return "\n".join([*lines, f"  BROKEN   {played.violation}"])
    ending = played.ending
    assert ending is not None
    if ending.completed:
        return "\n".join([*lines, "  ended    well: every step exactly once"])
    lines.append(f"  ended    by a verdict: {ending.cause}, {ending.culprit}")
    lines.append(f"           {ending.reason}")
    return "\n".join(lines)


def _one_as_json(played: Played) -> dict[str, Any]:
    ending = played.ending
    return {
        "seed": played.seed,
        "virtual_seconds": played.seconds,
        "events": played.events,
        "faults": [to_fields(fault) for fault in played.faults],
        "struck": [to_fields(fault) for fault in played.struck],
        "mishaps": [mishap.to_text() for mishap in played.mishaps],
        "completed": ending is not None and ending.completed,
        "cause": "" if ending is None else ending.cause,
        "culprit": "" if ending is None else ending.culprit,
        "reason": "" if ending is None else ending.reason,
        "violation": played.violation,
    }


# -- many runs --


def _run_many(asked: SimRequest, size: Size, faults: tuple[AnyFault, ...] | None) -> int:
    first, count = asked.whole("first", 0), asked.whole("seeds", 100)
    tally = Tally(size)
    jobs = [(seed, size, faults) for seed in range(first, first + count)]
    try:
        with progress(count, "playing") as step:
            for played in parallel(play_seed, jobs, asked.whole("processes", 2)):
                tally.add(played)
                step()
    except ValueError as error:
        raise BadInput(f"--fault: {error}.") from error
    recipes = _shrunk(asked, tally)
    _write(asked, _tally_as_json(tally, recipes), "\n".join(_tally_as_text(tally, recipes)))
    return 1 if tally.failures else 0


def _shrunk(asked: SimRequest, tally: Tally) -> list[tuple[Played, Recipe]]:
    found: list[tuple[Played, Recipe]] = []
    for played in tally.failures[:SHOWN_FAILURES]:
        if asked.text("shrink", "yes") == "no":
            recipe = Recipe(played.seed, tally.size, played.faults, played.mishaps)
        else:
            with progress(None, f"shrinking seed {played.seed}"):
                recipe = Shrinker(played, tally.size).shrink()
        found.append((played, recipe))
    return found


def _tally_as_text(tally: Tally, recipes: Iterable[tuple[Played, Recipe]]) -> list[str]:
    size = tally.size
    lines = [
        f"{tally.runs} runs of {size.workers} workers and {size.servers} servers, {size.steps} steps each: "
        f"{tally.events} events, {tally.virtual_seconds:.0f} virtual seconds, the longest run {tally.longest:.0f}"
    ]
    lines.append("faults that struck: " + (_counted(tally.struck) or "none"))
    lines.append("how the runs ended: " + _counted(tally.endings))
    if tally.slowest_verdict:
        lines.append(f"the slowest verdict came after {tally.slowest_verdict:.0f} virtual seconds without progress")
    lines.append(f"runs that broke a rule: {len(tally.failures)}")
    for played, recipe in recipes:
        lines += ["", f"seed {played.seed}: {played.headline}"]
        lines += [f"  with {to_text(fault)}" for fault in recipe.faults]
        lines += [f"  with {mishap.to_text()}" for mishap in recipe.mishaps]
        lines += ["  repeat it with:", f"    {recipe.command()}"]
    return lines


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def _tally_as_json(tally: Tally, recipes: Iterable[tuple[Played, Recipe]]) -> dict[str, Any]:
    return {
        "runs": tally.runs,
        "workers": tally.size.workers,
        "servers": tally.size.servers,
        "steps": tally.size.steps,
        "events": tally.events,
        "virtual_seconds": tally.virtual_seconds,
        "struck": dict(tally.struck),
        "endings": dict(tally.endings),
        "failing_seeds": [played.seed for played in tally.failures],
        "failures": [
            {
                "seed": played.seed,
                "violation": played.headline,
                "faults": [to_fields(fault) for fault in recipe.faults],
                "mishaps": [mishap.to_text() for mishap in recipe.mishaps],
                "command": recipe.command(),
            }
            for played, recipe in recipes
        ],
    }


def _write(asked: SimRequest, fields: dict[str, Any], text: str) -> None:
    target = asked.text("json")
    if target and target != "-":
        Path(target).write_text(json.dumps(fields, indent=1) + "\n")
    print(json.dumps(fields, indent=1) if target == "-" else text)


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, nothing elsewhere; the function that is yielded advances it by one."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
