"""What a report shows around the proof of a cause: the lead, both sides, one line per task, titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.diagnose.evidence import is_worker as _is_worker
from lockstep.diagnose.phrases.units import in_milliseconds as _in_milliseconds
from lockstep.diagnose.phrases.units import in_seconds as _in_seconds
from lockstep.diagnose.phrases.units import named as _named
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import Ends
from lockstep.protocol.core.plan import NO_PARAMETERS
from lockstep.protocol.core.waits import FORMING, WaitKind

# -- the lead: what is stuck, why, and what to do --


def _sentence(text: str) -> str:
    """With a capital and a full stop."""
    return "" if not text else f"{text[:1].upper()}{text[1:]}{'' if text[-1] in '.!?' else '.'}"


def lead(stuck: str, what: str, remedy: str, *, ends: bool = False) -> str:
    """``ends``: so the job ends."""
    parts = (_sentence(stuck), _sentence(what), "The job ends." if ends else "", remedy)
    return " ".join(part for part in parts if part)


def missing(kind: WaitKind, on: str, step: int, bucket: int, names: Sequence[str], what: str) -> str:
    """What a wait is for."""
    task, of = _named(on), _tensors(names, bucket)
    match kind:
        case WaitKind.GRADIENT:
            return f"{task}'s gradient of {of}"
        case WaitKind.PARAMETER:
            return f"the {'mean' if _is_worker(on) else 'new value'} of {of} from {task}"
        case WaitKind.SUM:
            return f"{task}'s part of the sum of {of}"
        case WaitKind.COMMIT:
            return f"{task} to commit step {step}"
        case WaitKind.APPLIED:
            return f"{task} to apply step {step}"
        case WaitKind.STATE:
            return f"{task}'s state before step {step + 1}"
        case WaitKind.NORM if _is_worker(on):
            return f"{task} to clip the gradients of step {step}"
        case WaitKind.NORM:
            return f"the norm of the mean gradient of step {step} from {task}"
        case WaitKind.HOLDING:
            return f"{task}, the second home, to hold step {step}"
        case WaitKind.CONNECTION:
            return f"a connection to {task}"
        case WaitKind.JOINING:
            return f"{task} to join"
        case WaitKind.COMPLETE:
            return "the cluster to be complete"
        case WaitKind.RETURN:
            return f"{task} to come back"
        case WaitKind.CALL:
            return f"{task} in {what}"
        case WaitKind.END:
            return f"{task} to finish"
        case WaitKind.OWN_STEP:
            return "its own computation"
        case _:
            return f"{what} from {task}"


def _tensors(names: Sequence[str], bucket: int) -> str:
    if NO_PARAMETERS.issuperset(names):
        return " ".join((f"bucket {bucket}", *names))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def stuck(waiter: str, missing: str, kind: WaitKind, step: int, *, slow: bool) -> str:
    """``slow``: the job goes on."""
    waiting = f"{_named(waiter)} is waiting for {missing}"
    if kind in FORMING:
        return f"the cluster is not complete: {waiting}"
    if kind is WaitKind.END:
        return f"the job cannot finish: {waiting}"
    if step < 0:
        return f"the job is {'slow' if slow else 'stuck'} before its first step: {waiting}"
    return f"step {step} is {'slow' if slow else 'stuck'}: {waiting}"


def job_ended(step: int) -> str:
    return f"the job ended in step {step}" if step >= 0 else "the job ended"


def about(culprit: str, text: str) -> str:
    """One sentence from a text that may name the task already."""
    name = _named(culprit)
    if culprit and text.startswith(culprit):
        return f"{name}{text.removeprefix(culprit)}"
    return text if not culprit or name in text else f"{name} {text}"


def nothing_proves_why(waiter: str, task: str) -> str:
    return f"the reason is not known: nothing proves why {_named(waiter)} is waiting for {_named(task)}"


def notice(stuck: str, seconds: float, what: str, left: str) -> str:
    return lead(f"{stuck} ({_in_seconds(seconds)} so far)", what, left)


def job_ends_in(seconds: float, ends: Ends) -> str:
    return f"Without progress the job ends in {seconds:.0f} s ({ends.value})."


def job_goes_on() -> str:
    return "The job does not end because of this."


def printed_by(lead: str, printer: str, where: str) -> str:
    """For a task that does not print the report itself."""
    copy = f"; a copy is in {where}" if where else ""
    return f"{lead} {_sentence(_named(printer))[:-1]} printed the report{copy}."


def printed_before(lead: str, where: str) -> str:
    """For a report that has been printed and still holds."""
    return f"{lead} The report is in {where}." if where else lead


def no_progress_for_too_long(lead: str, ends: Ends) -> str:
    flag = "--user_code_timeout" if ends is Ends.AFTER_USER_CODE else "--stall_after"
    return f"No progress within {flag}. {lead}"


# -- what each side saw --


def end_of_a_link(task: str, state: str, path: str, heard: float) -> str:
    over = f" over {path}" if path else ""
    last = f", last heard {_in_seconds(heard)} ago" if heard >= 0 else ""
    return f"{_named(task)}: {state}{over}{last}"


def waits_for(waiter: str, missing: str, seconds: float, state: str) -> str:
    return f"{_named(waiter)}: has been waiting {_in_seconds(seconds)} for {missing} ({state})"


def told_of_itself(task: str, doing: str) -> str:
    return f"{_named(task)}: {doing}"


def saw_of_this_tensor(task: str, ages: Mapping[str, float]) -> str:
    states = ", ".join(f"{state} {_in_seconds(age)} ago" for state, age in ages.items())
    return f"{_named(task)}: this tensor was {states}"


def does_not_answer(task: str, why: str) -> str:
    return f"{_named(task)}: does not answer ({why or 'no reason'})"


def monitor_of(task: str, pid: int, host: str, phase: str, state: str) -> str:
    return f"monitor of {_named(task)}: process {pid} on {host}, {phase}{', ' if state else ''}{state}"


def monitor_does_not_answer(task: str, why: str) -> str:
    return f"monitor of {_named(task)}: does not answer ({why or 'no reason'})"


def thread_does(doing: str, detail: str, seconds: float, step: int) -> str:
    more = f" ({detail})" if detail else ""
    return f"{doing}{more} for {_in_seconds(seconds)}, in step {step}"


def store_does(doing: str, seconds: float, step: int) -> str:
    return f"{doing} for {_in_seconds(seconds)}, in step {step}"


def no_progress(phase: str, step: int, seconds: float) -> str:
    return f"{phase or 'up'}, in step {step}, no progress for {_in_seconds(seconds)}"


# -- one line per task --


def thread_is_at(doing: str, detail: str, seconds: float) -> str:
    return f"{doing} ({detail}) for {_in_seconds(seconds)}" if detail else f"{doing} for {_in_seconds(seconds)}"


def store_is_at(doing: str, seconds: float) -> str:
    return f"{doing} for {_in_seconds(seconds)}"


def without_replica(doing: str) -> str:
    return f"{doing}; not everything has a second home now"


def has_exit_code(exit_code: int) -> str:
    return f"exit code {exit_code}"


def only_a_monitor(state: str) -> str:
    return f"does not answer; its monitor reports: {state}"


def was_not_asked() -> str:
    return "not asked"


def nobody_answers(why: str) -> str:
    return f"nothing answers: {why or 'no answer'}"


# -- a healthy job --


def some_do_not_answer(silent: Sequence[str], total: int, ends: Sequence[str]) -> str:
    names = ", ".join(_named(task) for task in silent[:5])
    said = f"no wait is longer than usual, but {len(silent)} of {total} tasks do not answer: {names}"
    return f"{said}; {'; '.join(ends[:5])}" if ends else said


def nobody_is_left(total: int, ends: Sequence[str]) -> str:
    """No task answers; where it says how one ended, only its monitor is left."""
    said = "the job is over" if len(ends) == total else "none of the tasks answers"
    return f"{said}: {'; '.join(ends[:5])}" if ends else said


def no_task_found() -> str:
    return "no task was found"


def healthy_before_a_step(tasks: int) -> str:
    return f"healthy: {tasks} tasks answer; no step has finished yet"


def healthy(tasks: int, step: int, median: float, spent: str) -> str:
    return f"healthy: {tasks} tasks answer, step {step}, {_in_milliseconds(median)} per step; {spent}"


def time_not_known_yet() -> str:
    return "where its time goes is not known yet"


def slowest_part(part: str, task: str, seconds: float) -> str:
    return f"the slowest part is {part} on {_named(task)} ({_in_milliseconds(seconds)})"


def longest_wait(task: str, seconds: float) -> str:
    return f"the longest wait for parameters is on {_named(task)} ({_in_milliseconds(seconds)})"


# -- titles and lines of the report --


def report_title(kind: str, title: str) -> str:
    return f"{kind}: {title}"


def cause_title(cause: Cause, culprit: str) -> str:
    """Where every rank trains, no task is a server."""
    return "overloaded rank" if cause is Cause.OVERLOADED_SERVER and _is_worker(culprit) else cause.value


def cause_unknown() -> str:
    return "unknown; this is what each side saw"


def cluster_is_healthy() -> str:
    return "the cluster is healthy"


def not_all_answer() -> str:
    return "not every task answers"


def culprit_line(culprit: str, host: str, pid: int, seconds: float, *, full_name: bool) -> str:
    """``full_name``: where no tensor key shows it."""
    name = f"{_named(culprit)} = {culprit}" if full_name and _named(culprit) != culprit else _named(culprit)
    return f"culprit:  {name}{_place(host, pid)}{f', for {_in_seconds(seconds)}' if seconds >= 0 else ''}"


def _place(host: str, pid: int) -> str:
    return f" (pid {pid} on {host})" if pid else ""


def waiting_line(peer: str) -> str:
    return f"waiting:  {_named(peer)}"


def missing_line(key: str, step: int) -> str:
    return f"missing:  {key} step {step}" if step >= -1 else f"missing:  {key}"


def holding_line(names: Sequence[str]) -> str:
    none = "no parameter " if NO_PARAMETERS.issuperset(names) else ""
    return f"holding:  {none}{', '.join(names)}"


def link_line(link: str) -> str:
    return f"link:     {link}"


def seen_line(seen: str) -> str:
    return f"seen:     {seen}"


def stack_title(culprit: str) -> str:
    return f"stack of {_named(culprit)}, innermost first:"


def also_title() -> str:
    return "also found, for other reasons:"


def also_line(cause: str, what: str) -> str:
    return f"{cause}: {what}"


def causes_title() -> str:
    return "how the wait leads there:"


def consequences_title() -> str:
    return "waits that follow from it:"


def edge_line(waiter: str, missing: str, step: int, seconds: float, state: str) -> str:
    in_step = f", step {step}" if step >= -1 else ""
    lasting = f", {_in_seconds(seconds)}" if seconds >= 0 else ""
    return f"{_named(waiter)} is waiting for {missing}{in_step}{lasting}{f' ({state})' if state else ''}"


def tasks_title() -> str:
    return "tasks:"


def task_line(task: str, host: str, pid: int, step: int, doing: str) -> str:
    in_step = f"step {step}, " if step >= 0 else ""
    return f"{_named(task)}{_place(host, pid)}: {in_step}{doing}"


def refused_title() -> str:
    return "refused callers (without a proof that they know this job's key):"


def refused_line(task: str, callers: int, entrance: str, caller: str, why: str) -> str:
    count = "1 caller" if callers == 1 else f"{callers} callers"
    return f"{_named(task)} refused {count}, the last from {caller or 'an unknown address'} at {entrance} ({why})"


def timeline_lines_title() -> str:
    return "timeline (what each task finished last):"


def timeline_line(task: str, parts: Sequence[tuple[str, float, float]]) -> str:
    """``parts``: what, how many seconds it took, and how many seconds ago it ended."""
    shown = ", ".join(f"{what} ({_in_milliseconds(took)}, {_in_seconds(ago)} ago)" for what, took, ago in parts)
    return f"{_named(task)}: {shown}"


def and_more(count: int) -> str:
    return f"and {count} more"
