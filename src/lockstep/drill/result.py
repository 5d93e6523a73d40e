"""What came of one drill, as values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class DrillStatus(StrEnum):
    """How a drill ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(slots=True, kw_only=True)
class DrillResult:
    """What was reported, and when, counted from the moment the fault struck."""

    name: str
    status: DrillStatus = DrillStatus.FAILED
    reason: str = ""
    fooled: bool = False
    """It is one of those that had fooled us."""
    struck: str = ""
    """The cause that was planted; empty: nothing that may be reported."""
    said: str = ""
    """The cause that was reported: the right one if it was, else the first wrong one; empty: nothing."""
    notice_seconds: float | None = None
    verdict_seconds: float | None = None
    kind: str = ""
    cause: str = ""
    culprit: str = ""
    peer: str = ""
    key: str = ""
    step: int = -2
    exit_codes: tuple[int | None, ...] = ()
    """Of the tasks that were not struck, if the job must end; None: still running."""
    report: str = ""

    def conclude(self, problems: list[str]) -> None:
        """It passed if there is no problem."""
        self.reason = "; ".join(problems)
        self.status = DrillStatus.FAILED if problems else DrillStatus.PASSED

    def skip(self, reason: str) -> None:
        self.status, self.reason = DrillStatus.SKIPPED, reason

    def to_fields(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "report"}

    def line(self) -> str:
        """One line of the table."""
        notice = "-" if self.notice_seconds is None else f"{self.notice_seconds:.1f} s"
        verdict = "-" if self.verdict_seconds is None else f"{self.verdict_seconds:.1f} s"
        what = self.reason or f"{self.cause}: {self.culprit}"
        return f"{self.name:<26} {self.status:<8} notice {notice:<7} verdict {verdict:<7} {what}"
