"""What a comparison found: medians, spread, ratios within a round, and where a step's time goes. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.benchmark.compare.contestants import Contestant, ContestantKind
from lockstep.runtime.trace.step_times import StepShares


@dataclass(frozen=True, slots=True)
class StepDetail:
    """Details of a Lockstep run: the parts of a step, the store's work in it, and what was copied and moved."""

    shares: StepShares | None
    reduce_seconds: float
    """Time of the store's thread per step, on all servers together; most of it overlaps with backward."""
    update_seconds: float
    copies: dict[str, int]
    links: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: images per second of all workers together, or why there is no number."""

    images_per_second: float = 0.0
    failure: str = ""
    cannot: str = ""
    """Why this cannot run on this machine at all, which is not a failure."""
    detail: StepDetail | None = None
    window: tuple[float, float] | None = None
    """When the timed steps began and ended (monotonic), if that is known."""
    processor_seconds: float | None = None
    """Of all programs of the run together, in a timed step."""
    paths: tuple[str, ...] = ()
    """How tensors travelled, for people."""


@dataclass(slots=True)
class Row:
    """All runs of one contestant, by round."""

    contestant: Contestant
    runs: list[Measurement] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [run.images_per_second for run in self.runs if run.images_per_second > 0]

    @property
    def processor_seconds(self) -> list[float]:
        return [run.processor_seconds for run in self.runs if run.processor_seconds is not None]

    @property
    def paths(self) -> tuple[str, ...]:
        return next((run.paths for run in reversed(self.runs) if run.paths), ())

    @property
    def trouble(self) -> str:
        """Why there are no numbers, or fewer than requested."""
        return next((run.failure or run.cannot for run in self.runs if run.failure or run.cannot), "")

    @property
    def failed(self) -> bool:
        return any(run.failure for run in self.runs)

    def detail(self) -> StepDetail | None:
        return next((run.detail for run in reversed(self.runs) if run.detail is not None), None)


def ratios(row: Row, other: Row | None) -> list[float]:
    """This contestant relative to another, round by round: a noisy moment disturbs both."""
    if other is None:
        return []
    pairs = zip(row.runs, other.runs, strict=False)
    return [a.images_per_second / b.images_per_second for a, b in pairs if a.images_per_second and b.images_per_second]


def row_of(rows: Sequence[Row], kind: ContestantKind) -> Row | None:
    return next((row for row in rows if row.contestant.kind is kind), None)


def spread(values: Sequence[float], digits: int) -> str:
    """``median (lowest to highest)``; a dash for nothing."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(rows: Sequence[Row]) -> list[str]:
    """The table as lines of text, which are also Markdown."""
    limit, ddp, tf_cnn = (
        row_of(rows, kind) for kind in (ContestantKind.LIMIT, ContestantKind.DDP, ContestantKind.TF_CNN)
    )
    others = [("of the limit", limit), ("over DDP", ddp), ("over tf_cnn", tf_cnn)]
    shown = [(title, other) for title, other in others if other is not None and other.rates]
    watched = any(row.processor_seconds for row in rows)
    cells = [["", "images/s", *(title for title, _ in shown), *(["CPU s a step"] if watched else [])]]
    for row in rows:
        if row.rates:
            compared = [spread(ratios(row, other), 2) for _, other in shown]
            used = [spread(row.processor_seconds, 3)] if watched else []
            cells.append([row.contestant.name, spread(row.rates, 1), *compared, *used])
        else:
            what = "failed" if row.failed else "cannot run here"
            cells.append([row.contestant.name, what, *("-" for _ in range(len(cells[0]) - 2))])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def detail_lines(row: Row) -> list[str]:
    """Where the time of this contestant's steps goes, in words."""
    detail = row.detail()
    if detail is None or detail.shares is None:
        return []
    shares, name = detail.shares, row.contestant.name
    parts = ", ".join(
        f"{words} {1000 * seconds:.2f} ms"
        for words, seconds in (
            ("computing", shares.computing),
            ("waiting for slower workers", shares.others),
            ("gradients on their way", shares.gradients),
            ("reduce and update", shares.update),
            ("parameters on their way", shares.parameters),
        )
    )
    return [
        f"{name}: a step is {parts} (mean of {shares.steps} steps)",
        f"{name}: the servers work {1000 * detail.reduce_seconds:.2f} ms on reducing and "
        f"{1000 * detail.update_seconds:.2f} ms on updating in a step, mostly behind backward",
    ]


def as_json(rows: Sequence[Row], about: dict[str, Any]) -> dict[str, Any]:
    """All measurements as plain JSON values."""
    limit, ddp = row_of(rows, ContestantKind.LIMIT), row_of(rows, ContestantKind.DDP)
    return {**about, "contestants": [_json_row(row, limit, ddp) for row in rows]}


def _json_row(row: Row, limit: Row | None, ddp: Row | None) -> dict[str, Any]:
    detail = row.detail()
    return {
        "name": row.contestant.name,
        "kind": row.contestant.kind.value,
        "protocol": row.contestant.protocol,
        "images_per_second": [run.images_per_second for run in row.runs],
        "median": statistics.median(row.rates) if row.rates else None,
        "of_the_limit": ratios(row, limit),
        "over_ddp": ratios(row, ddp),
        "cpu_seconds_per_step": row.processor_seconds,
        "paths": list(row.paths),
        "trouble": row.trouble,
        "step": None if detail is None else dataclasses.asdict(detail),
    }
