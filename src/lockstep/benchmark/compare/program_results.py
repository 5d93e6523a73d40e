"""What the comparison of a user's program found: milliseconds of a step, its parts, and ratios within a round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.benchmark.compare.results import spread
from lockstep.runtime.compared import Shape, StepParts

NAMES = {
    Shape.LIMIT: "trainers without communication (the limit)",
    Shape.SINGLE: "one process, all threads",
    Shape.DDP: "PyTorch DDP",
    Shape.RANKS: "Lockstep, every rank trains",
    Shape.SERVERS: "Lockstep, with servers",
}
PARTS = ("forward", "backward", "averaging", "optimizer", "rest")
TITLES = ("forward", "backward", "averaging after it", "optimizer.step()", "data and the rest")


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run in one shape: a mean step, or why there is none."""

    parts: StepParts | None = None
    failure: str = ""
    cannot: str = ""
    """Why the program cannot run in this shape, which is not a failure of it."""


@dataclass(slots=True)
class ShapeRow:
    """All runs in one shape, by round."""

    shape: Shape
    runs: list[ProgramRun] = field(default_factory=list)

    @property
    def milliseconds(self) -> list[float]:
        return [1000 * run.parts.step for run in self.runs if run.parts is not None]

    @property
    def trouble(self) -> str:
        """Why there are no numbers, or fewer than requested."""
        return next((run.failure or run.cannot for run in self.runs if run.failure or run.cannot), "")

    @property
    def failed(self) -> bool:
        return any(run.failure for run in self.runs)

    def part(self, name: str) -> float:
        """The median of one part over the rounds, in milliseconds."""
        return 1000 * statistics.median([float(getattr(run.parts, name)) for run in self.runs if run.parts is not None])


def speed_ratios(row: ShapeRow, other: ShapeRow | None) -> list[float]:
    """How many steps in the time of one of ``other``, round by round: a noisy moment disturbs both."""
    if other is None:
        return []
    pairs = zip(row.runs, other.runs, strict=False)
    return [theirs.parts.step / ours.parts.step for ours, theirs in pairs if ours.parts and theirs.parts]


def row_in(rows: Sequence[ShapeRow], shape: Shape) -> ShapeRow | None:
    return next((row for row in rows if row.shape is shape), None)


def program_table(rows: Sequence[ShapeRow]) -> list[str]:
    """The table as lines of text, which are also Markdown."""
    others = [("of the limit", row_in(rows, Shape.LIMIT)), ("over DDP", row_in(rows, Shape.DDP))]
    shown = [(title, other) for title, other in others if other is not None and other.milliseconds]
    cells = [["", "ms/step", *(title for title, _ in shown), *TITLES]]
    for row in rows:
        if row.milliseconds:
            compared = [spread(speed_ratios(row, other), 2) for _, other in shown]
            parts = [f"{row.part(name):.2f}" for name in PARTS]
            cells.append([NAMES[row.shape], spread(row.milliseconds, 2), *compared, *parts])
        else:
            what = "failed" if row.failed else "cannot run so"
            cells.append([NAMES[row.shape], what, *("-" for _ in range(len(cells[0]) - 2))])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def program_json(rows: Sequence[ShapeRow], about: dict[str, Any]) -> dict[str, Any]:
    """All measurements as plain JSON values."""
    limit, ddp = row_in(rows, Shape.LIMIT), row_in(rows, Shape.DDP)
    return {
        **about,
        "shapes": [
            {
                "shape": row.shape.value,
                "name": NAMES[row.shape],
                "steps": [None if run.parts is None else asdict(run.parts) for run in row.runs],
                "of_the_limit": speed_ratios(row, limit),
                "over_ddp": speed_ratios(row, ddp),
                "trouble": row.trouble,
            }
            for row in rows
        ],
    }
