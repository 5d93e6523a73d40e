"""What an analysis yields: causes, verdicts, and the whole diagnosis; plain data with a JSON form."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lockstep.diagnose import phrases
from lockstep.foreign import JsonError, plain, read_json
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import CANNOT_HEAL, ENDS, WARNINGS, Ends
from lockstep.protocol.core.parts import Part

FORMAT = 1
"""Version of the JSON form. A reader refuses any other."""

MAX_BYTES = 4 << 20
_MOST = 1e15
"""No number in a report is larger."""


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
    """How long it has lasted; -1: not known."""
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
class RefusedCallers:
    """The callers without a proof that one process has refused, and the last of them."""

    task: str
    callers: int
    entrance: str
    caller: str
    why: str


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
    refused: tuple[RefusedCallers, ...] = ()
    ends: bool = False
    """The task that reports this ends the job because of it."""

    def to_fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> bytes:
        return json.dumps(self.to_fields(), ensure_ascii=False).encode(errors="replace")


class ReportError(ValueError):
    """This is not a readable report; the text is one plain sentence."""


def read_diagnosis(data: bytes) -> Diagnosis:
    """Read the JSON form back. Anything wrong with it becomes one plain sentence (``ReportError``)."""
    if len(data) > MAX_BYTES:
        raise ReportError(phrases.report_too_long(MAX_BYTES, len(data)))
    try:
        fields = read_json(data, MAX_BYTES)
    except JsonError as error:
        raise ReportError(phrases.report_not_json(error)) from error
    if not isinstance(fields, dict) or "format" not in fields:
        raise ReportError(phrases.report_without_format())
    if fields.pop("format") != FORMAT:
        raise ReportError(phrases.report_of_another_version(FORMAT))
    try:
        if not fields.keys() >= {"verdict", "also", "causes", "consequences", "tasks", "timeline"}:
            raise TypeError("it is incomplete")
        return _built(Diagnosis, fields)
    except (TypeError, ValueError) as error:
        raise ReportError(phrases.report_damaged(error)) from error


_Built = TypeVar("_Built")


_HINTS: dict[type, dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (Diagnosis, Verdict, Edge, TaskLine, TimelineSpan, RefusedCallers)
}


def _built(kind: type[_Built], fields: object) -> _Built:
    """A dataclass from its fields, each of its declared type: nobody who uses a report checks again."""
    hints = _HINTS[kind]
    if not isinstance(fields, dict) or not fields.keys() <= hints.keys():
        raise TypeError(f"it has something else in the place of a {kind.__name__}")
    return kind(**{name: _value(f"{kind.__name__}.{name}", hints[name], value) for name, value in fields.items()})


def _value(name: str, hint: Any, value: object) -> Any:
    parts = get_args(hint)
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple([_value(name, parts[0], one) for one in value])
    if parts and parts[-1] is type(None):
        return None if value is None else _value(name, parts[0], value)
    if hint is str and isinstance(value, str):
        return plain(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, float) and isinstance(value, int | hint) and not isinstance(value, bool) and abs(value) <= _MOST:
        return hint(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _built(hint, value)
    raise TypeError(f"it has {plain(repr(value), 40)} as {name}")
