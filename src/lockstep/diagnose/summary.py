"""What a report says besides its verdict: one line a task, the last steps as a timeline, and how a healthy job spends
its time."""

from __future__ import annotations

from lockstep.diagnose.evidence import Evidence, Seen, is_worker
from lockstep.diagnose.verdict import Span, TaskLine
from lockstep.protocol.reach import Reach

MAX_LINES = 64
MAX_SPANS = 2000


def task_lines(evidence: Evidence) -> tuple[TaskLine, ...]:
    """One line a task; where there are very many, those that do not answer come first."""
    lines = [_line(seen) for seen in evidence.tasks.values()]
    if len(lines) > MAX_LINES:
        lines.sort(key=lambda line: line.answers)
    return tuple(lines[:MAX_LINES])


def _line(seen: Seen) -> TaskLine:
    view, monitor = seen.view, seen.monitor
    if view is not None:
        doing = view.phase
        if view.main is not None and view.main.doing:
            detail = f" {view.main.detail}" if view.main.detail else ""
            doing = f"{view.main.doing}{detail} for {view.main.seconds:.1f} s"
        elif view.store is not None and view.store.busy > 0.05:
            doing = f"{view.store.doing} for {view.store.busy:.1f} s"
        return TaskLine(task=seen.task, host=view.host, pid=view.pid, step=view.step, doing=doing, answers=True)
    if monitor is not None:
        state = f"exit code {monitor.exit_code}" if monitor.exited else monitor.state or monitor.phase
        return TaskLine(
            task=seen.task,
            host=monitor.host,
            pid=monitor.pid,
            step=-2,
            doing=f"does not answer; its monitor: {state}",
            answers=False,
        )
    if seen.silence.reach is Reach.NOT_ASKED:  # at the end of a job there is no time to ask everybody
        return TaskLine(task=seen.task, host="", pid=0, step=-2, doing="was not asked any more", answers=True)
    why = seen.monitor_silence.text or seen.silence.text or "no answer"
    return TaskLine(task=seen.task, host="", pid=0, step=-2, doing=f"nobody answers: {why}", answers=False)


def timeline(evidence: Evidence) -> tuple[Span, ...]:
    """What each task did in the last steps."""
    spans: list[Span] = []
    for seen in evidence.tasks.values():
        if seen.view is not None and len(spans) < MAX_SPANS:
            spans += [Span(task=seen.task, what=w, begin=b, end=e) for w, b, e in seen.view.spans[-40:]]
    return tuple(spans[:MAX_SPANS])


def health_summary(evidence: Evidence) -> str:
    """One sentence on a job in which nobody waits longer than usual, with the slowest part of a step."""
    silent = [seen.task for seen in evidence.tasks.values() if seen.view is None]
    if silent:
        names = ", ".join(silent[:5])
        return f"no wait is longer than usual, but {len(silent)} of {len(evidence.tasks)} tasks do not answer: {names}"
    views = [seen.view for seen in evidence.tasks.values() if seen.view is not None]
    if not views:
        return "no task was found"
    step = max(view.step for view in views)
    median = max(view.step_median for view in views)
    if median <= 0:
        return f"healthy: {len(views)} tasks answer; no step has been finished yet"
    return f"healthy: {len(views)} tasks answer, step {step}, {median * 1000:.0f} ms a step; {_slowest(evidence)}"


def _slowest(evidence: Evidence) -> str:
    parts: list[tuple[float, str]] = []
    for seen in evidence.tasks.values():
        for name, seconds in seen.view.parts.items() if seen.view is not None else ():
            if name != "waiting" or not is_worker(seen.task):
                parts.append((seconds, f"{name} on {seen.task}"))
    waiting = [
        (seen.view.parts["waiting"], seen.task)
        for seen in evidence.tasks.values()
        if seen.view is not None and "waiting" in seen.view.parts and is_worker(seen.task)
    ]
    if not parts and not waiting:
        return "where its time goes is not known yet"
    words = []
    if parts:
        seconds, name = max(parts)
        words.append(f"the slowest part is {name} ({seconds * 1000:.0f} ms)")
    if waiting:
        seconds, task = max(waiting)
        words.append(f"the longest wait for parameters is on {task} ({seconds * 1000:.0f} ms)")
    return "; ".join(words)
