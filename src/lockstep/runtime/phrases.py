"""What a running task says to people, one function a sentence. Nothing reads these back."""

from __future__ import annotations

import signal

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import Incarnation, JobId, Step, TaskId, hex64
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.parts import Part
from lockstep.protocol.phrases import leaves

# -- how a job ended --


def ended_well(steps: Step) -> str:
    return f"the job ended well after {steps} steps"


def goes_back(step: Step, culprit: str, text: str) -> str:
    return f"the job goes back to its newest checkpoint{_in_step(step)}: {culprit} {text}"


def ended(step: Step, culprit: str, reason: Reason) -> str:
    found = f"{reason.source.value}: {reason.cause.value}: " if reason.reported else ""
    return f"the job ended{_in_step(step)}: {culprit} {found}{reason.text}"


def _in_step(step: Step) -> str:
    return f" in step {step}" if step >= 0 else ""


def left_alone(task: str, text: str) -> str:
    return f"{task} {text}"


def peer_leaves(task: TaskId, peer: TaskId, departure: Departure) -> str:
    return f"{task}: {peer} {leaves(departure)}"


def failed_with(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {error}"


def error_in_the_loop(error: Exception, where: str) -> str:
    return f"{type(error).__name__} in the loop at {where}: {error}"


def cannot_serve(error: Exception) -> str:
    return f"could not do a server's work: {type(error).__name__}: {error}"


def cannot_copy(error: Exception) -> str:
    return f"could not copy between host and GPU: {type(error).__name__}: {error}"


def cannot_reduce(problem: str, known: str) -> str:
    return f"cannot reduce: {problem}; {known}" if known else f"cannot reduce: {problem}"


def without_name(sentence: str, task: TaskId) -> str:
    """A sentence about a task, as what goes on after its name."""
    return sentence.removeprefix(f"{task} ")


# -- files that a task leaves behind --


def files_on_request(why: str, task: TaskId, where: str) -> str:
    return f"{why}: the snapshot and the journal of {task} are in {where}"


def files_are_in(where: str) -> str:
    return f"the report and the journals are in {where}"


# -- what became of a peer --


def how_it_ended(code: int, pid: int, host: str) -> str:
    return f"{killed_by(-code) if code < 0 else exit_code(code)} (process {pid} on {host})"


def killed_by(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"


def exit_code(code: int) -> str:
    return f"ended with exit code {code}"


def started_again(pid: int, host: str) -> str:
    return f"was started again as process {pid} on {host}; its former life is gone"


def former_life_gone(life: Incarnation) -> str:
    return f"was started again; its former life {hex64(life)} is gone"


def left_early(how: str) -> str:
    return f"left before the job ended: it {how}"


def lack_of_memory(how: str, evidence: str) -> str:
    return f"{how}, for lack of memory: {evidence}"


def is_gone(found: str) -> str:
    return f"is gone: its link broke and its monitor does not answer ({found})"


# -- what is found at an address --


def not_looked_at() -> str:
    return "was not looked at yet"


def refuses_since(seconds: float) -> str:
    return f"refuses connections since {seconds:.0f} s; nothing listens there"


def no_answer_since(seconds: float) -> str:
    return f"gives no answer since {seconds:.0f} s: the host is down, or a firewall drops the packets"


def is_another_task(found: str, meant: TaskId) -> str:
    return f"is {found} there, not {meant}: the host lists or the task indices do not fit"


def there_instead(found: str) -> str:
    return f"{found} is there instead: the host lists or the task indices do not fit"


def is_up(phase: str, pid: int, host: str) -> str:
    return f"is up, {phase} (process {pid} on {host})"


def is_up_in(phase: str) -> str:
    return f"is up, {phase}"


def is_up_but(why: str) -> str:
    return f"is up, but {why}"


def nobody_answers() -> str:
    return "nobody answers"


def other_version(theirs: str, task: str, ours: str) -> str:
    return f"runs Lockstep {theirs}, {task} runs {ours}; install the same version"


def does_not_reach(pid: int, host: str, task: str, front: str, finding: str) -> str:
    return f"is up (process {pid} on {host}) but does not reach {task}: from there, {front} {finding}"


def workers_missing(seconds: float, names: str) -> str:
    return f"not all workers came within {seconds:g} s; missing: {names}"


# -- links --


def does_not_speak(transport: str) -> str:
    return f"it does not speak {transport}"


def connected_again() -> str:
    return "the peer connected again"


def dialed_again() -> str:
    return "dialed again"


def link_not_open_in_time() -> str:
    return "the link did not open in time"


def port_of_task_closed(address: str, found: str) -> str:
    return (
        f"answers, but the port of its task, {address}, {found}; "
        "a task takes a free port beside the listed one, so let all TCP ports through between the hosts"
    )


def cannot_open_link(why: str) -> str:
    return f"answers, but the link could not be opened: {why}"


def refuses_this_task(why: str) -> str:
    return f"refuses this task: {why}"


def cannot_use_protocol(protocol: str, peer: TaskId, why: str, *, one_host: bool) -> str:
    remedy = "use --server_protocol=auto" + (", or run both tasks on one host" if one_host else "")
    return f"cannot use --server_protocol={protocol} with {peer}: {why}; {remedy}"


# -- why a link is refused --


def has_left(task: TaskId) -> str:
    return f"{task} has left: its job is over"


def versions_differ(task: TaskId, ours: str, caller: str, theirs: str) -> str:
    return f"{task} runs Lockstep {ours}, {caller} runs {theirs}; install the same version"


def tokens_differ(caller: str, task: TaskId) -> str:
    return f"{caller} came with another job token than {task} has; start both with the same --job_token"


def link_not_expected(task: TaskId, caller: str) -> str:
    return f"{task} expects no link from {caller}; give every task the same host lists"


def jobs_differ(caller: str, theirs: JobId, task: TaskId, ours: JobId) -> str:
    return f"{caller} belongs to job {theirs:016x}, {task} to job {ours:016x}; end the older one"


def taken_by_another(caller: str) -> str:
    return (
        f"{caller} is taken by another process; two tasks were started with the same --job_name and "
        "--task_index, or an old one still runs"
    )


def place_taken(task: TaskId) -> str:
    return f"the job runs already with another life of {task}, which has taken its place"


def not_told_of_life(task: TaskId, peer: TaskId) -> str:
    return f"{task} has not been told yet of this life of {peer}"


def yet_to_leave(task: TaskId) -> str:
    return f"{task} has yet to leave the former life of the job"


def runs_with_another_life(task: TaskId) -> str:
    return f"the job runs already with another life of {task}; start the whole job again"


# -- the last steps --


def part_of_step(part: Part, step: Step) -> str:
    return f"{part}, step {step}"
