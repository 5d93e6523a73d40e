"""A diagnosis in words: one screen, the same on every task."""

from __future__ import annotations

from lockstep.diagnose.verdict import Diagnosis, Edge, Verdict
from lockstep.protocol.causes import Cause

WIDTH = 100
RULE = "-" * WIDTH
"""Above and below a report."""

MAX_EDGES = 8
MAX_TASKS = 16
MAX_STACK = 10


def headline(kind: str, diagnosis: Diagnosis) -> str:
    """One line: what is the matter."""
    verdict = diagnosis.verdict
    if verdict is None:
        return diagnosis.summary
    if kind == "notice":
        return notice_line(verdict)
    cause = "unknown; here is what each side saw" if verdict.cause is Cause.UNKNOWN else verdict.cause.value
    return f"{kind}: {cause}: {verdict.what}"


def notice_line(verdict: Verdict) -> str:
    """Who waits for whom, for what, and where that one is now."""
    where = f": {verdict.what}" if verdict.cause is not Cause.UNKNOWN else ""
    step = f", step {verdict.step}" if verdict.step >= 0 else ""
    if not verdict.peer or not verdict.key:
        return verdict.what
    return f"{verdict.peer} waits {verdict.seconds:.1f} s for {verdict.culprit}{step}: {verdict.key}{where}"


def render(kind: str, diagnosis: Diagnosis) -> str:
    """The whole report."""
    verdict = diagnosis.verdict
    lines = [RULE, f"lockstep {kind}: {_title(diagnosis)}"]
    if verdict is not None:
        lines += _verdict_lines(verdict)
    else:
        lines.append(f"  {diagnosis.summary}")
    if diagnosis.also:
        lines.append("besides, and not because of it:")
        lines += [f"  {other.cause.value}: {other.what}" for other in diagnosis.also]
    lines += _edges("how the wait leads there:", diagnosis.causes)
    lines += _edges("waits that only follow from it:", diagnosis.consequences)
    lines.append("tasks:")
    for task in diagnosis.tasks[:MAX_TASKS]:
        place = f" ({task.host}, pid {task.pid})" if task.pid else ""
        step = f"step {task.step}, " if task.step >= 0 else ""
        lines.append(f"  {task.task}{place}: {step}{task.doing}")
    if len(diagnosis.tasks) > MAX_TASKS:
        lines.append(f"  and {len(diagnosis.tasks) - MAX_TASKS} more")
    return "\n".join([*lines, RULE])


def _title(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    if verdict is None:
        return "the cluster is healthy" if diagnosis.healthy else "nothing stands still"
    return "unknown; here is what each side saw" if verdict.cause is Cause.UNKNOWN else verdict.cause.value


def _verdict_lines(verdict: Verdict) -> list[str]:
    lines = [f"  {verdict.what}"]
    place = f" ({verdict.host}, pid {verdict.pid})" if verdict.pid else ""
    lines.append(f"  culprit:  {verdict.culprit}{place}, for {verdict.seconds:.1f} s")
    if verdict.peer:
        lines.append(f"  waiting:  {verdict.peer}")
    if verdict.key:
        lines.append(f"  missing:  {verdict.key}" + (f" step {verdict.step}" if verdict.step >= -1 else ""))
    if verdict.names:
        lines.append(f"  holding:  {', '.join(verdict.names)}")
    if verdict.link:
        lines.append(f"  link:     {verdict.link}")
    lines += [f"  seen:     {line}" for line in verdict.evidence]
    if verdict.stack:
        lines.append(f"  stack of {verdict.culprit}, innermost first:")
        lines += [f"    {line}" for line in verdict.stack[:MAX_STACK]]
    lines.append(f"  to do:    {verdict.remedy}")
    return lines


def _edges(title: str, edges: tuple[Edge, ...]) -> list[str]:
    if not edges:
        return []
    shown = [
        f"  {e.waiter} -> {e.on}: {e.what}, step {e.step}, {e.seconds:.1f} s ({e.state})" for e in edges[:MAX_EDGES]
    ]
    more = [f"  and {len(edges) - MAX_EDGES} more"] if len(edges) > MAX_EDGES else []
    return [title, *shown, *more]
