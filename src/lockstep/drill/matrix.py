"""The sum of several drills: what struck against what was said, and how soon. Values in, values and lines out."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.drill.result import DrillResult, DrillStatus
from lockstep.protocol.core.timing import PROMISE_SECONDS

NOTHING = "nothing"
"""How a drill is shown in which nothing may be reported, and one in which nothing was."""
_LETTERS = string.ascii_lowercase + string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from fault to first correct report; infinite where there was none."""

    count: int
    p50: float
    p90: float
    worst: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Times:
        ordered = sorted(seconds)
        return cls(len(ordered), _rank(ordered, 0.5), _rank(ordered, 0.9), _rank(ordered, 1.0))

    @property
    def kept(self) -> bool:
        """Whether the promise was kept in 9 of 10 drills."""
        return self.p90 <= PROMISE_SECONDS

    def to_fields(self) -> dict[str, Any]:
        shown = {"p50": self.p50, "p90": self.p90, "max": self.worst}
        finite = {name: round(value, 2) if math.isfinite(value) else None for name, value in shown.items()}
        return {"drills": self.count, **finite, "aim_p90": PROMISE_SECONDS, "aim_kept": self.kept}

    def line(self, name: str) -> str:
        if not self.count:
            return f"  {name:<14} no drill"
        shown = " ".join(f"{_seconds(value):>7}" for value in (self.p50, self.p90, self.worst))
        return f"  {name:<14} {self.count:>6} {shown}  {'kept' if self.kept else 'MISSED'}"


def _rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed: no mean of two, as one may be infinite."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "never"


@dataclass(frozen=True, slots=True)
class DrillSum:
    """What several drills come to."""

    counts: Counter[tuple[str, str]]
    """How often what was said of what struck; empty: nothing."""
    wrong: tuple[str, ...]
    skipped: tuple[str, ...]
    of_all: Times
    of_fooled: Times
    """Of those alone that had fooled us."""

    @classmethod
    def of(cls, results: Sequence[DrillResult]) -> DrillSum:
        ran = [result for result in results if result.status is not DrillStatus.SKIPPED]
        struck = [result for result in ran if result.struck]
        return cls(
            counts=Counter((result.struck, result.said) for result in ran),
            wrong=tuple(result.name for result in ran if result.status is DrillStatus.FAILED),
            skipped=tuple(result.name for result in results if result.status is DrillStatus.SKIPPED),
            of_all=Times.of(_first_report(result) for result in struck),
            of_fooled=Times.of(_first_report(result) for result in struck if result.fooled),
        )

    def to_fields(self) -> dict[str, Any]:
        cells = [
            {"struck": struck or NOTHING, "said": said or NOTHING, "drills": count}
            for (struck, said), count in sorted(self.counts.items())
        ]
        return {
            "matrix": cells,
            "drills": self.counts.total(),
            "wrong": list(self.wrong),
            "skipped": list(self.skipped),
            "first_report_seconds": {"all": self.of_all.to_fields(), "fooled": self.of_fooled.to_fields()},
        }

    def lines(self) -> list[str]:
        """What is printed after several drills."""
        lines = ["", "What struck (rows) and what was said (columns), in number of drills:", "", *self._matrix(), ""]
        lines.append(f"{self.counts.total() - len(self.wrong)} of {self.counts.total()} drills went as expected.")
        if self.wrong:
            lines += ["Wrong:", *(f"  {name}" for name in self.wrong)]
        if self.skipped:
            lines += ["Skipped:", *(f"  {name}" for name in self.skipped)]
        lines += ["", "Seconds from fault to first correct report:"]
        lines.append(f"  {'':<14} {'drills':>6} {'p50':>7} {'p90':>7} {'max':>7}  aim: p90 {PROMISE_SECONDS:g} s")
        return [*lines, self.of_all.line("all"), self.of_fooled.line("had fooled us")]

    def _matrix(self) -> list[str]:
        """One letter per cause, so that all causes fit in one line; what is right is on the diagonal."""
        causes = sorted({cause for pair in self.counts for cause in pair})
        widths = [max(len(str(self.counts[row, column])) for row in causes) for column in causes]
        lines = ["  " + " ".join(f"{letter:>{width}}" for letter, width in zip(_LETTERS, widths, strict=False))]
        for letter, row in zip(_LETTERS, causes, strict=False):
            cells = [f"{self.counts[row, column] or '.':>{w}}" for column, w in zip(causes, widths, strict=True)]
            off = any(self.counts[row, column] for column in causes if column != row)
            lines.append(f"  {' '.join(cells)}  {letter} = {row or NOTHING}{'  <- WRONG' if off else ''}")
        return lines


def _first_report(result: DrillResult) -> float:
    return math.inf if result.notice_seconds is None else result.notice_seconds
