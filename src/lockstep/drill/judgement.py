"""Judges what a cluster reported after a fault had struck: reports in, result out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.drill.model import Drill
from lockstep.drill.result import DrillResult
from lockstep.protocol.core.causes import SPOKEN, WITH_FILES, ReportKind
from lockstep.protocol.core.timing import PROMISE_SECONDS, VERDICT_SECONDS

Event = dict[str, Any]
"""One report, as the tasks write it into the file of events."""
_CLOCKS = 0.5
"""Seconds by which a report may seem to come before its fault."""


def hear(drill: Drill, result: DrillResult, events: Iterable[Event], struck: float) -> bool:
    """Note what was reported; True once the answer is complete."""
    for event in events:
        seconds = event["time"] - struck
        if event["kind"] not in SPOKEN or seconds < -_CLOCKS:
            continue
        if result.notice_seconds is None and _names_the_right(drill, event):
            result.notice_seconds = seconds
        if event["kind"] == ReportKind.VERDICT and result.verdict_seconds is None:
            result.verdict_seconds = seconds
        if event["kind"] == drill.kind and (not result.cause or drill.is_right(event["cause"])):
            result.kind, result.cause = event["kind"], event["cause"]
            result.culprit, result.peer = event["culprit"], event["peer"]
            result.key, result.step = event["key"], event["step"]
    return drill.is_right(result.cause) and result.kind == drill.kind


def _names_the_right(drill: Drill, event: Event) -> bool:
    named = {event["culprit"], event["peer"]}
    right_step = drill.step == -2 or abs(event["step"] - drill.step) <= 1
    return drill.pair[0] in named and (not drill.key or drill.key in event["key"]) and right_step


def problems_of(drill: Drill, result: DrillResult, events: Sequence[Event]) -> list[str]:
    """What is wrong with what was reported."""
    problems = []
    if not drill.is_right(result.cause) or result.kind != drill.kind:
        said = f"{result.kind or 'nothing'} {result.cause}".strip()
        problems.append(f"expected {drill.kind} {drill.cause.value!r}, got {said!r}")
    elif drill.one_answer and (different := _other_answers(drill, events)):
        problems.append(f"it was also called {different}")
    elif result.culprit not in drill.pair:
        problems.append(f"blamed {result.culprit}, not {' or '.join(drill.pair)}")
    if result.notice_seconds is None:
        problems.append("nothing named the right tasks, key and step")
    elif result.notice_seconds > PROMISE_SECONDS:
        problems.append(f"the first correct report came after {result.notice_seconds:.1f} s")
    if drill.kind is ReportKind.VERDICT and (result.verdict_seconds or 0.0) > VERDICT_SECONDS + drill.proof_takes:
        problems.append(f"the verdict came after {result.verdict_seconds:.1f} s")
    return problems


def _other_answers(drill: Drill, events: Iterable[Event]) -> list[tuple[str, str, str]]:
    """The verdicts, of any task, that are not the expected one."""
    expected = (drill.cause.value, *drill.pair[:2])
    verdicts = [event for event in events if event["kind"] == ReportKind.VERDICT]
    return sorted({(event["cause"], event["culprit"], event["peer"]) for event in verdicts} - {expected})


def false_alarms(drill: Drill, events: Iterable[Event]) -> list[Event]:
    """The reports, in a job that must end well, that are not the one the drill expects."""
    return [event for event in events if event["kind"] in WITH_FILES and not _was_to_come(drill, event)]


def _was_to_come(drill: Drill, event: Event) -> bool:
    return drill.goes_on and event["kind"] == drill.kind and drill.is_right(event["cause"])


def cause_said(drill: Drill, events: Sequence[Event], struck: float) -> str:
    """What these reports call the fault: wrongly where a wrong one counts, else rightly, else by the first of them."""
    spoken = [event for event in events if event["kind"] in SPOKEN and event["time"] - struck >= -_CLOCKS]
    wrong = false_alarms(drill, spoken) if drill.kind is None or drill.goes_on else []
    if drill.one_answer:
        wrong += [e for e in spoken if e["kind"] == ReportKind.VERDICT and not drill.is_right(e["cause"])]
    right = [event for event in spoken if event["kind"] == drill.kind and drill.is_right(event["cause"])]
    first = [] if drill.kind is None else [*sorted(spoken, key=lambda event: event["kind"] not in WITH_FILES)]
    return next((str(event["cause"]) for event in (*wrong, *right, *first)), "")
