"""What a report shows around the proof of a cause: both sides, one line a task, fixed words, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.diagnose.phrases.units import in_milliseconds as _in_milliseconds
from lockstep.diagnose.phrases.units import in_seconds as _in_seconds

# -- the verdict --


def about(culprit: str, text: str) -> str:
    """One sentence of a text that may begin with the task's name already."""
    return f"{culprit} {text}" if culprit and not text.startswith(culprit) else text


def nothing_proves_why(waiter: str, task: str) -> str:
    return f"{waiter} waits for {task}, and nothing proves why"


def end_of_a_link(task: str, state: str, path: str, heard: float) -> str:
    over = f" over {path}" if path else ""
    last = f", last heard {_in_seconds(heard)} ago" if heard >= 0 else ""
    return f"{task}: {state}{over}{last}"


# -- what each side saw --


def waits_for(waiter: str, what: str, step: int, seconds: float, state: str) -> str:
    return f"{waiter}: waits for {what} of step {step} for {_in_seconds(seconds)} ({state})"


def told_of_itself(task: str, doing: str) -> str:
    return f"{task}: {doing}"


def saw_of_this_tensor(task: str, ages: Mapping[str, float]) -> str:
    states = ", ".join(f"{state} {_in_seconds(age)} ago" for state, age in ages.items())
    return f"{task}: of this tensor: {states}"


def does_not_answer(task: str, why: str) -> str:
    return f"{task}: does not answer ({why or 'no reason'})"


def monitor_of(task: str, pid: int, host: str, phase: str, state: str) -> str:
    return f"monitor of {task}: process {pid} on {host}, {phase}, {state}"


def monitor_does_not_answer(task: str, why: str) -> str:
    return f"monitor of {task}: does not answer ({why or 'no reason'})"


def thread_does(doing: str, detail: str, seconds: float, step: int) -> str:
    named = f" ({detail})" if detail else ""
    return f"{doing}{named} for {_in_seconds(seconds)}, in step {step}"


def store_does(doing: str, seconds: float, step: int) -> str:
    return f"{doing} for {_in_seconds(seconds)}, in step {step}"


def no_progress(phase: str, step: int, seconds: float) -> str:
    return f"{phase or 'up'}, in step {step}, no progress for {_in_seconds(seconds)}"


# -- one line a task --


def thread_is_at(doing: str, detail: str, seconds: float) -> str:
    return f"{doing} {detail} for {_in_seconds(seconds)}" if detail else f"{doing} for {_in_seconds(seconds)}"


def store_is_at(doing: str, seconds: float) -> str:
    return f"{doing} for {_in_seconds(seconds)}"


def has_exit_code(exit_code: int) -> str:
    return f"exit code {exit_code}"


def only_a_monitor(state: str) -> str:
    return f"does not answer; its monitor: {state}"


def was_not_asked() -> str:
    return "was not asked any more"


def nobody_answers(why: str) -> str:
    return f"nobody answers: {why or 'no answer'}"


# -- a healthy job --


def some_do_not_answer(silent: Sequence[str], total: int) -> str:
    names = ", ".join(silent[:5])
    return f"no wait is longer than usual, but {len(silent)} of {total} tasks do not answer: {names}"


def no_task_found() -> str:
    return "no task was found"


def healthy_before_a_step(tasks: int) -> str:
    return f"healthy: {tasks} tasks answer; no step has been finished yet"


def healthy(tasks: int, step: int, median: float, spent: str) -> str:
    return f"healthy: {tasks} tasks answer, step {step}, {_in_milliseconds(median)} a step; {spent}"


def time_not_known_yet() -> str:
    return "where its time goes is not known yet"


def slowest_part(part: str, task: str, seconds: float) -> str:
    return f"the slowest part is {part} on {task} ({_in_milliseconds(seconds)})"


def longest_wait(task: str, seconds: float) -> str:
    return f"the longest wait for parameters is on {task} ({_in_milliseconds(seconds)})"


# -- the report's own words --


def report_title(kind: str, title: str) -> str:
    return f"lockstep {kind}: {title}"


def cause_unknown() -> str:
    return "unknown; here is what each side saw"


def cluster_is_healthy() -> str:
    return "the cluster is healthy"


def nothing_stands_still() -> str:
    return "nothing stands still"


def notice(waiter: str, seconds: float, task: str, step: int, key: str, what: str) -> str:
    in_step = f", step {step}" if step >= 0 else ""
    where = f": {what}" if what else ""
    return f"{waiter} waits {_in_seconds(seconds)} for {task}{in_step}: {key}{where}"


def culprit_line(culprit: str, host: str, pid: int, seconds: float) -> str:
    return f"culprit:  {culprit}{_place(host, pid)}, for {_in_seconds(seconds)}"


def _place(host: str, pid: int) -> str:
    return f" ({host}, pid {pid})" if pid else ""


def waiting_line(peer: str) -> str:
    return f"waiting:  {peer}"


def missing_line(key: str, step: int) -> str:
    return f"missing:  {key} step {step}" if step >= -1 else f"missing:  {key}"


def holding_line(names: Sequence[str]) -> str:
    return f"holding:  {', '.join(names)}"


def link_line(link: str) -> str:
    return f"link:     {link}"


def seen_line(seen: str) -> str:
    return f"seen:     {seen}"


def stack_title(culprit: str) -> str:
    return f"stack of {culprit}, innermost first:"


def remedy_line(remedy: str) -> str:
    return f"to do:    {remedy}"


def also_title() -> str:
    return "besides, and not because of it:"


def also_line(cause: str, what: str) -> str:
    return f"{cause}: {what}"


def causes_title() -> str:
    return "how the wait leads there:"


def consequences_title() -> str:
    return "waits that only follow from it:"


def edge_line(waiter: str, on: str, what: str, step: int, seconds: float, state: str) -> str:
    return f"{waiter} -> {on}: {what}, step {step}, {_in_seconds(seconds)} ({state})"


def tasks_title() -> str:
    return "tasks:"


def task_line(task: str, host: str, pid: int, step: int, doing: str) -> str:
    in_step = f"step {step}, " if step >= 0 else ""
    return f"{task}{_place(host, pid)}: {in_step}{doing}"


def and_more(count: int) -> str:
    return f"and {count} more"


# -- the page --


def page_title(kind: str, title: str) -> str:
    return f"Lockstep {kind}: {title}"


def graph_title() -> str:
    return "Who waits for whom"


def graph_label() -> str:
    return "wait-for graph"


def nobody_waits_long() -> str:
    return "Nobody waits longer than usual."


def edge_label(waiter: str, on: str, what: str, step: int, seconds: float, state: str) -> str:
    return f"{waiter} waits {_in_seconds(seconds)} for {on}: {what}, step {step} ({state})"


def timeline_title() -> str:
    return "The last steps"


def timeline_label() -> str:
    return "timeline"


def no_step_finished() -> str:
    return "No step has been finished yet."


def left_edge(seconds: float) -> str:
    return f"The left edge is {seconds:.2f} s before the report."


def span_label(task: str, what: str, seconds: float) -> str:
    return f"{task}: {what}, {1000 * seconds:.1f} ms"
