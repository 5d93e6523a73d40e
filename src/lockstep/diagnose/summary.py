"""What a report shows besides its verdict: one line per task, a timeline of the last steps, and how a healthy job
spends its time."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.diagnose import phrases
from lockstep.diagnose.evidence import Evidence, Seen, is_worker
from lockstep.diagnose.verdict import RefusedCallers, TaskLine, TimelineSpan
from lockstep.errors import EXIT_VERDICT
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.parts import Part
from lockstep.protocol.core.reach import Reach

MAX_LINES = 64
MAX_SPANS = 2000


def task_lines(evidence: Evidence) -> tuple[TaskLine, ...]:
    """One line per task; where there are very many, those that do not answer come first."""
    lines = [task_line(seen) for seen in evidence.tasks.values()]
    if len(lines) > MAX_LINES:
        lines.sort(key=lambda line: line.answers)
    return tuple(lines[:MAX_LINES])


def task_line(seen: Seen) -> TaskLine:
    """Whether this task answers, and what it is doing."""
    view, monitor = seen.view, seen.monitor
    if view is not None:
        doing = view.phase
        if view.main is not None and view.main.doing is not Doing.NOTHING:
            doing = phrases.thread_is_at(view.main.doing, view.main.detail, view.main.seconds)
        elif view.store is not None and view.store.busy > 0.05:
            doing = phrases.store_is_at(view.store.doing, view.store.busy)
        if view.lacks_replica:
            doing = phrases.without_replica(doing)
        return TaskLine(task=seen.task, host=view.host, pid=view.pid, step=view.step, doing=doing, answers=True)
    if monitor is not None:
        state = phrases.has_exit_code(monitor.exit_code) if monitor.exited else monitor.state or monitor.phase
        return TaskLine(
            task=seen.task,
            host=monitor.host,
            pid=monitor.pid,
            step=-2,
            doing=phrases.only_a_monitor(state),
            answers=False,
        )
    if seen.silence.reach is Reach.NOT_ASKED:  # at the end of a job there is no time to ask every task
        return TaskLine(task=seen.task, host="", pid=0, step=-2, doing=phrases.was_not_asked(), answers=True)
    doing = phrases.nobody_answers(seen.monitor_silence.text or seen.silence.text)
    return TaskLine(task=seen.task, host="", pid=0, step=-2, doing=doing, answers=False)


def refused_callers(evidence: Evidence) -> tuple[RefusedCallers, ...]:
    """Of every task and monitor that has refused some."""
    found = [
        RefusedCallers(task=task, callers=one.callers, entrance=one.entrance, caller=one.caller, why=one.why)
        for task, seen in evidence.tasks.items()
        for side in (seen.monitor, seen.view)
        if side is not None and (one := side.refused) is not None
    ]
    return tuple(sorted(found, key=lambda one: -one.callers)[:MAX_LINES])


def timeline(evidence: Evidence) -> tuple[TimelineSpan, ...]:
    """What each task did in the last steps."""
    spans: list[TimelineSpan] = []
    for seen in evidence.tasks.values():
        if seen.view is not None and len(spans) < MAX_SPANS:
            spans += [
                TimelineSpan(task=seen.task, part=one.part, what=one.what, begin=one.begin, end=one.end)
                for one in seen.view.spans[-40:]
            ]
    return tuple(spans[:MAX_SPANS])


def health_summary(evidence: Evidence) -> str:
    """One sentence on a job without unusually long waits, with the slowest part of a step."""
    silent = [seen for seen in evidence.tasks.values() if seen.view is None]
    ends = _ends(silent)
    views = [seen.view for seen in evidence.tasks.values() if seen.view is not None]
    if silent and views:
        return phrases.some_do_not_answer([seen.task for seen in silent], len(evidence.tasks), ends)
    if not views:
        return phrases.nobody_is_left(len(silent), ends) if silent else phrases.no_task_found()
    step = max(view.step for view in views)
    median = max(view.step_median for view in views)
    if median <= 0:
        return phrases.healthy_before_a_step(len(views))
    return phrases.healthy(len(views), step, median, _slowest(evidence))


def _ends(silent: Sequence[Seen]) -> list[str]:
    """How the tasks among them ended whose monitors still answer; first those that left for a reason of their own."""
    ended = [(seen.task, seen.monitor) for seen in silent if seen.monitor is not None and seen.monitor.exited]
    ended.sort(key=lambda one: (one[1].exit_code == 0, one[1].exit_code == EXIT_VERDICT))
    return [phrases.ended(task, phrases.how_it_ended(one.exit_code), one.reason) for task, one in ended]


def _slowest(evidence: Evidence) -> str:
    parts: list[tuple[float, str, str]] = []
    for seen in evidence.tasks.values():
        for name, seconds in seen.view.parts.items() if seen.view is not None else ():
            if name != Part.WAITING or not is_worker(seen.task):
                parts.append((seconds, name, seen.task))
    waiting = [
        (seen.view.parts[Part.WAITING], seen.task)
        for seen in evidence.tasks.values()
        if seen.view is not None and Part.WAITING in seen.view.parts and is_worker(seen.task)
    ]
    if not parts and not waiting:
        return phrases.time_not_known_yet()
    words = []
    if parts:
        seconds, name, task = max(parts)
        words.append(phrases.slowest_part(name, task, seconds))
    if waiting:
        seconds, task = max(waiting)
        words.append(phrases.longest_wait(task, seconds))
    return "; ".join(words)
