"""Shortens a failing run: the same failure with fewer faults, fewer mishaps, fewer steps and fewer tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lockstep.protocol.core.ids import TaskId
from lockstep.sim.explore import Played, play
from lockstep.sim.faults import AnyFault, to_text
from lockstep.sim.generate import Size, draw_run
from lockstep.sim.machines import MachineMaker
from lockstep.sim.scenario import Mishap

Item = TypeVar("Item")
MAX_PLAYS = 400


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that repeats a run, as a command line can express it."""

    seed: int
    size: Size
    faults: tuple[AnyFault, ...]
    mishaps: tuple[Mishap, ...]

    def play(self, maker: MachineMaker | None = None) -> Played:
        run = draw_run(self.seed, self.size)
        scenario = replace(run.scenario, mishaps=self.mishaps)
        return play(replace(run, scenario=scenario, faults=self.faults), maker)

    def command(self) -> str:
        """The command that repeats it."""
        size = self.size
        words = [f"lockstep sim --seed={self.seed} --workers={size.workers} --ps={size.servers} --steps={size.steps}"]
        words += [f"--fault='{to_text(fault)}'" for fault in self.faults] or ["--fault=none"]
        words += [f"--mishap='{mishap.to_text()}'" for mishap in self.mishaps] or ["--mishap=none"]
        return " ".join(words)


@dataclass(slots=True)
class Shrinker:
    """One search for a shorter run."""

    failing: Played
    size: Size
    maker: MachineMaker | None = None
    plays: int = 0

    def shrink(self) -> Recipe:
        """The shortest run found that fails in the same way."""
        recipe = Recipe(self.failing.seed, self.size, self.failing.faults, self.failing.mishaps)
        if not self._fails(recipe):
            return recipe
        while True:
            before = recipe
            recipe = self._smaller_cluster(self._with_less(recipe))
            if recipe == before:
                return recipe

    def _fails(self, recipe: Recipe) -> bool:
        if self.plays >= MAX_PLAYS:
            return False
        self.plays += 1
        try:
            played = recipe.play(self.maker)
        except ValueError:
            return False  # a fault of a task that a smaller cluster does not have
        return not played.sound and played.broken == self.failing.broken

    def _with_less(self, recipe: Recipe) -> Recipe:
        def with_faults(faults: Sequence[AnyFault]) -> bool:
            return self._fails(replace(recipe, faults=tuple(faults)))

        recipe = replace(recipe, faults=tuple(fewest(recipe.faults, with_faults)))

        def with_mishaps(mishaps: Sequence[Mishap]) -> bool:
            return self._fails(replace(recipe, mishaps=tuple(mishaps)))

        return replace(recipe, mishaps=tuple(fewest(recipe.mishaps, with_mishaps)))

    def _smaller_cluster(self, recipe: Recipe) -> Recipe:
        for name in ("workers", "servers", "steps"):
            now: int = getattr(recipe.size, name)
            for smaller in sorted({1, 2, now // 2, now - 1}):
                sizes = {"workers": recipe.size.workers, "servers": recipe.size.servers, "steps": recipe.size.steps}
                candidate = replace(recipe, size=Size(**{**sizes, name: smaller}))
                if 0 < smaller < now and _fits(candidate) and self._fails(candidate):
                    recipe = candidate
                    break
        return recipe


def _fits(recipe: Recipe) -> bool:
    """Whether every task that the plan names is there."""
    names = [TaskId.parse(fault.task) for fault in recipe.faults]
    limits = {"worker": recipe.size.workers, "ps": recipe.size.servers}
    return all(task.index < limits[task.role.value] for task in names)


def fewest(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A part of ``items`` that still fails, and from which no single one can be left out."""
    kept = list(items)
    if not kept or fails([]):
        return []
    pieces = 2
    while len(kept) >= 2:
        length = -(-len(kept) // pieces)
        chunks = [(start, min(start + length, len(kept))) for start in range(0, len(kept), length)]
        for start, end in chunks:
            rest = kept[:start] + kept[end:]
            if rest and fails(rest):
                kept, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if pieces >= len(kept):
                break
            pieces = min(len(kept), 2 * pieces)
    return kept
