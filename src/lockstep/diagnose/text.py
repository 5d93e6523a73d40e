"""A diagnosis in words: one screen, the same on every task."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.diagnose import phrases
from lockstep.diagnose.verdict import Diagnosis, Edge, Verdict

WIDTH = 100
RULE = "-" * WIDTH
"""Above and below a report."""

MAX_EDGES = 8
MAX_TASKS = 16
MAX_STACK = 10


def notice_line(verdict: Verdict) -> str:
    """Who waits for whom, for what, and where that one is now."""
    if not verdict.peer or not verdict.key:
        return verdict.what
    what = verdict.what if verdict.proven else ""
    return phrases.notice(verdict.peer, verdict.seconds, verdict.culprit, verdict.step, verdict.key, what)


def render(kind: str, diagnosis: Diagnosis) -> str:
    """The whole report."""
    verdict = diagnosis.verdict
    lines = [RULE, phrases.report_title(kind, _title(diagnosis))]
    if verdict is not None:
        lines += _verdict_lines(verdict)
    else:
        lines.append(f"  {diagnosis.summary}")
    if diagnosis.also:
        lines.append(phrases.also_title())
        lines += _indented(phrases.also_line(other.cause.value, other.what) for other in diagnosis.also)
    lines += _edges(phrases.causes_title(), diagnosis.causes)
    lines += _edges(phrases.consequences_title(), diagnosis.consequences)
    lines.append(phrases.tasks_title())
    lines += _indented(
        phrases.task_line(one.task, one.host, one.pid, one.step, one.doing) for one in diagnosis.tasks[:MAX_TASKS]
    )
    if len(diagnosis.tasks) > MAX_TASKS:
        lines += _indented([phrases.and_more(len(diagnosis.tasks) - MAX_TASKS)])
    return "\n".join([*lines, RULE])


def _title(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    if verdict is None:
        return phrases.cluster_is_healthy() if diagnosis.healthy else phrases.nothing_stands_still()
    return verdict.cause.value if verdict.proven else phrases.cause_unknown()


def _verdict_lines(verdict: Verdict) -> list[str]:
    lines = [verdict.what, phrases.culprit_line(verdict.culprit, verdict.host, verdict.pid, verdict.seconds)]
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
    lines.append(phrases.remedy_line(verdict.remedy))
    return _indented(lines)


def _edges(title: str, edges: tuple[Edge, ...]) -> list[str]:
    if not edges:
        return []
    shown = [phrases.edge_line(e.waiter, e.on, e.what, e.step, e.seconds, e.state) for e in edges[:MAX_EDGES]]
    more = [phrases.and_more(len(edges) - MAX_EDGES)] if len(edges) > MAX_EDGES else []
    return [title, *_indented([*shown, *more])]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
