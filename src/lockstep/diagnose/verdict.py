"""What an analysis yields: causes, verdicts, and the whole diagnosis; plain data with a JSON form."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.diagnose import phrases
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import CANNOT_HEAL, ENDS, WARNINGS, Ends
from lockstep.protocol.core.parts import Part

_Made = TypeVar("_Made")

FORMAT = 1
"""Version of the JSON form. A reader refuses any other."""

MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One cause with its proof. ``peer`` is the other end where the cause lies between two tasks."""

    cause: Cause
    culprit: str
    peer: str = ""
    host: str = ""
    pid: int = 0
    key: str = ""
    names: tuple[str, ...] = ()
    step: int = -2
    link: str = ""
    seconds: float = 0.0
    stuck: str = ""
    """What is stuck, and who is waiting for what. The lead of a report is this, ``what`` and ``remedy``."""
    what: str = ""
    """The cause in one sentence."""
    evidence: tuple[str, ...] = ()
    """What each side saw, one sentence each."""
    stack: tuple[str, ...] = ()
    remedy: str = ""
    left: float = -1.0
    """Seconds after which the job ends unless something moves; -1: it does not, or at once."""

    @property
    def ends(self) -> Ends:
        """When it ends the job."""
        return ENDS[self.cause]

    @property
    def heals(self) -> bool:
        return self.cause not in CANNOT_HEAL

    @property
    def warning(self) -> bool:
        return self.cause in WARNINGS

    @property
    def proven(self) -> bool:
        return self.cause is not Cause.UNKNOWN

    def pair(self) -> frozenset[str]:
        """The tasks between which something is missing."""
        return frozenset(task for task in (self.culprit, self.peer) if task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One wait, as the report draws it; ``what`` names what is missing, and whose it is."""

    waiter: str
    on: str
    what: str
    step: int
    seconds: float
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """One task in a report: whether it answers, and what it is doing."""

    task: str
    host: str
    pid: int
    step: int
    doing: str
    answers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """Part of a timeline: what a task did from ``begin`` to ``end`` (seconds before the report)."""

    task: str
    part: Part | None = None
    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that a report shows."""

    job: str = ""
    time: float = 0.0
    asker: str = ""
    healthy: bool = False
    summary: str = ""
    verdict: Verdict | None = None
    also: tuple[Verdict, ...] = ()
    """Causes that do not follow from the first."""
    causes: tuple[Edge, ...] = ()
    """The chain of waits that leads to the culprit."""
    consequences: tuple[Edge, ...] = ()
    """Waits that follow from it."""
    tasks: tuple[TaskLine, ...] = ()
    timeline: tuple[TimelineSpan, ...] = ()
    ends: bool = False
    """The task that reports this ends the job because of it."""

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, ensure_ascii=False).encode()


class ReportError(ValueError):
    """This is not a readable report; the text is one plain sentence."""


def read_diagnosis(data: bytes) -> Diagnosis:
    """Read the JSON form back. Anything wrong with it becomes one plain sentence (``ReportError``)."""
    if len(data) > MAX_BYTES:
        raise ReportError(phrases.report_too_long(MAX_BYTES, len(data)))
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReportError(phrases.report_not_json(error)) from error
    if not isinstance(fields, dict) or "format" not in fields:
        raise ReportError(phrases.report_without_format())
    if fields.pop("format") != FORMAT:
        raise ReportError(phrases.report_of_another_version(FORMAT))
    try:
        return _made(
            Diagnosis,
            {
                **fields,
                "verdict": None if fields["verdict"] is None else _verdict(fields["verdict"]),
                "also": tuple(_verdict(one) for one in fields["also"]),
                "causes": tuple(_made(Edge, one) for one in fields["causes"]),
                "consequences": tuple(_made(Edge, one) for one in fields["consequences"]),
                "tasks": tuple(_made(TaskLine, one) for one in fields["tasks"]),
                "timeline": tuple(_span(one) for one in fields["timeline"]),
            },
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ReportError(phrases.report_damaged(error)) from error


def _span(fields: dict[str, Any]) -> TimelineSpan:
    part = fields.get("part")
    return _made(TimelineSpan, {**fields, "part": None if part is None else Part(part)})


def _verdict(fields: dict[str, Any]) -> Verdict:
    tuples = {name: tuple(str(line) for line in fields[name]) for name in ("names", "evidence", "stack")}
    return _made(Verdict, {**fields, **tuples, "cause": Cause(fields["cause"])})


_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
"""The types that JSON has, by their name in an annotation."""


def _made(kind: type[_Made], fields: dict[str, Any]) -> _Made:
    """A value of this class. TypeError where a text stands where a number belongs: it would fail when it is printed."""
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]  # all of them are dataclasses
        value, allowed = fields.get(one.name, one.default), _PLAIN.get(str(one.type))
        if allowed is not None and type(value) not in allowed:
            raise TypeError(f"{one.name} is {type(value).__name__}, not {one.type}")
    return kind(**fields)
