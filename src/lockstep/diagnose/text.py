"""A diagnosis as text: one sentence first, then at most one screen of details."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.diagnose import phrases
from lockstep.diagnose.verdict import Diagnosis, Edge, RefusedCallers, TimelineSpan, Verdict

WIDTH = 100
RULE = "-" * WIDTH
"""Above and below the details."""

MAX_EDGES = 8
MAX_TASKS = 16
MAX_STACK = 10
MAX_SPANS = 3


def notice_line(verdict: Verdict) -> str:
    """Who is waiting for what, for how long, and why where that is proven."""
    if not verdict.stuck:
        return verdict.what
    left = ""
    if verdict.left >= 0:
        left = phrases.job_ends_in(verdict.left, verdict.ends)
    elif verdict.warning:
        left = phrases.job_goes_on()
    return phrases.notice(verdict.stuck, verdict.seconds, verdict.what if verdict.proven else "", left)


def lead_line(diagnosis: Diagnosis, *, remedy: bool = True) -> str:
    """What is stuck, why, and what to do about it."""
    verdict = diagnosis.verdict
    if verdict is None:
        return phrases.lead(diagnosis.summary, "", "")
    return phrases.lead(verdict.stuck, verdict.what, verdict.remedy if remedy else "", ends=diagnosis.ends)


def render(kind: str, diagnosis: Diagnosis, healthy: str = "", unproven: str = "") -> str:
    """The whole report. ``healthy``: its title where there is nothing to report, if not that of a cluster of ours;
    ``unproven``: the same where something is wrong, and nobody knows what."""
    verdict = diagnosis.verdict
    lines = [lead_line(diagnosis), RULE, phrases.report_title(kind, _title(diagnosis, healthy, unproven))]
    if verdict is not None:
        lines += _verdict_lines(verdict)
    if diagnosis.also:
        lines.append(phrases.also_title())
        lines += _indented(
            phrases.also_line(phrases.cause_title(other.cause, other.culprit), other.what) for other in diagnosis.also
        )
    # The lead has said the one wait that a chain of one consists of.
    lines += _edges(phrases.causes_title(), diagnosis.causes) if len(diagnosis.causes) > 1 else []
    lines += _edges(phrases.consequences_title(), diagnosis.consequences)
    lines.append(phrases.tasks_title())
    lines += _indented(
        phrases.task_line(one.task, one.host, one.pid, one.step, one.doing) for one in diagnosis.tasks[:MAX_TASKS]
    )
    if len(diagnosis.tasks) > MAX_TASKS:
        lines += _indented([phrases.and_more(len(diagnosis.tasks) - MAX_TASKS)])
    return "\n".join([*lines, *_refused(diagnosis.refused), *_timeline(diagnosis.timeline), RULE])


def _title(diagnosis: Diagnosis, healthy: str, unproven: str) -> str:
    verdict = diagnosis.verdict
    if verdict is None:
        if diagnosis.healthy:
            return healthy or phrases.cluster_is_healthy()
        return unproven or phrases.not_all_answer()
    return phrases.cause_title(verdict.cause, verdict.culprit) if verdict.proven else phrases.cause_unknown()


def _verdict_lines(verdict: Verdict) -> list[str]:
    place = (verdict.culprit, verdict.host, verdict.pid, verdict.seconds)
    lines = [phrases.culprit_line(*place, full_name=verdict.culprit not in verdict.key)]
    if verdict.peer:
        lines.append(phrases.waiting_line(verdict.peer))
    if verdict.key:
        lines.append(phrases.missing_line(verdict.key, verdict.step))
    if verdict.names:
        lines.append(phrases.holding_line(verdict.names))
    if verdict.link:
        lines.append(phrases.link_line(verdict.link))
    lines += [phrases.seen_line(line) for line in verdict.evidence]
    if verdict.stack:
        lines.append(phrases.stack_title(verdict.culprit))
        lines += _indented(verdict.stack[:MAX_STACK])
    return _indented(lines)


def _edges(title: str, edges: tuple[Edge, ...]) -> list[str]:
    if not edges:
        return []
    shown = [phrases.edge_line(e.waiter, e.what, e.step, e.seconds, e.state) for e in edges[:MAX_EDGES]]
    more = [phrases.and_more(len(edges) - MAX_EDGES)] if len(edges) > MAX_EDGES else []
    return [title, *_indented([*shown, *more])]


def _refused(found: tuple[RefusedCallers, ...]) -> list[str]:
    if not found:
        return []
    shown = [phrases.refused_line(one.task, one.callers, one.entrance, one.caller, one.why) for one in found]
    more = [phrases.and_more(len(found) - MAX_EDGES)] if len(found) > MAX_EDGES else []
    return [phrases.refused_title(), *_indented([*shown[:MAX_EDGES], *more])]


def _timeline(spans: tuple[TimelineSpan, ...]) -> list[str]:
    by_task: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        by_task.setdefault(span.task, []).append(span)
    lines = []
    for task, own in list(by_task.items())[:MAX_TASKS]:
        newest = sorted(own, key=lambda span: -span.end)[-MAX_SPANS:]
        lines.append(phrases.timeline_line(task, [(span.what, span.begin - span.end, span.end) for span in newest]))
    return [phrases.timeline_lines_title(), *_indented(lines)] if lines else []


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
