"""What a running task tells people, one function per sentence. Nothing reads these back."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from lockstep.foreign import plain
from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import Incarnation, JobId, Step, TaskId, hex64
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.loop_watch import IterationLeftOut
from lockstep.protocol.core.parts import Part
from lockstep.protocol.phrases import leaves, named

# -- how to ask --


def ask_with(address: str) -> str:
    return f"ask this job with: lockstep why {address}"


# -- calling somebody --


def page_failed(flag: str, problem: str) -> str:
    return f"{flag} could not tell anybody of the verdict: {problem}"


def page_dropped() -> str:
    return "a verdict was not sent on: those before it are still waiting for --on_verdict or --verdict_webhook"


# -- how a job ended --


def ended_well(steps: Step) -> str:
    return f"the job ended well after {steps} steps"


def goes_back(step: Step, culprit: str, text: str) -> str:
    return f"the job goes back to its newest checkpoint{_in_step(step)}: {_about(culprit, text)}"


def ended(step: Step, culprit: str, reason: Reason) -> str:
    found = f"{reason.source.value} ({reason.cause.value}): " if reason.reported else ""
    return f"the job ended{_in_step(step)}: {found}{_about(culprit, reason.text)}"


def _about(culprit: str, text: str) -> str:
    """One sentence from a text that may name the task already."""
    name = named(culprit)
    if culprit and text.startswith(culprit):
        return f"{name}{text.removeprefix(culprit)}"
    return text if not culprit or name in text else f"{name} {text}"


def _in_step(step: Step) -> str:
    return f" in step {step}" if step >= 0 else ""


def left_alone(task: str, text: str) -> str:
    return f"{named(task)} {text}"


def peer_leaves(task: TaskId, peer: TaskId, departure: Departure) -> str:
    return f"{named(task)}: {named(peer)} {leaves(departure)}"


def left_out(found: IterationLeftOut) -> str:
    ahead, behind = named(found.ahead), named(found.behind)
    at, other = found.iterations
    return (
        f"{ahead} has left out what {behind} has done: in step {found.step} it is at {at}, {behind} at {other} "
        f"({plain(found.loop)}). Look there for a continue, an exception that is caught, or less data. The job goes "
        f"on; it fails if {ahead} has no more steps to make while others have."
    )


def failed_with(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {error}"


def error_in_the_loop(error: Exception, where: str) -> str:
    return f"{type(error).__name__} in the loop at {where}: {error}"


def cannot_serve(error: Exception) -> str:
    return f"failed in its store: {type(error).__name__}: {error}"


def cannot_copy(error: Exception) -> str:
    return f"could not copy between host and GPU: {type(error).__name__}: {error}"


def cannot_reduce(problem: str) -> str:
    return f"cannot reduce: {problem}"


def without_name(sentence: str, task: TaskId) -> str:
    """A sentence about a task, without its name in front."""
    return sentence.removeprefix(f"{named(task)} ")


# -- files that a task leaves behind --


def files_on_request(why: str, task: TaskId, where: str) -> str:
    return f"{why}: the snapshot and the journal of {named(task)} are in {where}"


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
    return f"was restarted as process {pid} on {host}; its earlier incarnation is gone"


def former_life_gone(life: Incarnation) -> str:
    return f"was restarted; its earlier incarnation {hex64(life)} is gone"


def left_early(how: str) -> str:
    return f"left before the job ended: it {how}"


def lack_of_memory(how: str, evidence: str) -> str:
    return f"{how} because its host ran out of memory: {evidence}"


def is_gone(found: str) -> str:
    return f"is gone: its link broke and its monitor does not answer ({found})"


# -- what is found at an address --


def not_looked_at() -> str:
    return "has not been checked yet"


def refuses_since(seconds: float) -> str:
    return f"has refused connections for {seconds:.0f} s; nothing listens there"


def had_ended(how: str, seconds: float) -> str:
    return f"; {seconds:.0f} s ago it {how}"


def no_answer_since(seconds: float) -> str:
    return f"has not answered for {seconds:.0f} s: the host is down, or a firewall drops the packets"


def is_another_task(found: str, meant: TaskId) -> str:
    return f"is {named(found)}, not {named(meant)}: the host lists or the task indices do not match"


def is_up(phase: str, pid: int, host: str) -> str:
    return f"is up, {phase} (process {pid} on {host})"


def is_up_but(why: str) -> str:
    return f"is up, but {why}"


def other_version(theirs: str, task: str, ours: str) -> str:
    return f"runs Lockstep {theirs}, but {named(task)} runs {ours}; install the same version"


def does_not_reach(pid: int, host: str, task: str, front: str, finding: str) -> str:
    return f"is up (process {pid} on {host}) but cannot reach {named(task)}: from there, {front} {finding}"


# -- links --


def does_not_speak(transport: str) -> str:
    return f"it does not support {transport}"


def connected_again() -> str:
    return "the peer connected again"


def dialed_again() -> str:
    return "dialed again"


def link_not_open_in_time() -> str:
    return "the link did not open in time"


def port_of_task_closed(address: str, found: str) -> str:
    return (
        f"answers, but the port of its task, {address}, {found}; "
        "a task also listens at another port than the listed one; allow all TCP ports between the hosts, or --ports"
    )


def cannot_open_link(why: str) -> str:
    return f"answers, but the link could not be opened: {why}"


def refuses_this_task(why: str) -> str:
    return f"refuses this task: {why}"


def cannot_use_protocol(protocol: str, peer: TaskId, why: str, *, one_host: bool) -> str:
    remedy = "use --server_protocol=auto" + (", or run both tasks on one host" if one_host else "")
    return f"cannot use --server_protocol={protocol} with {named(peer)}: {why}; {remedy}"


# -- why a link is refused --


def has_left(task: TaskId) -> str:
    return f"{named(task)} has left: its job is over"


def versions_differ(task: TaskId, ours: str, caller: str, theirs: str) -> str:
    return f"{named(task)} runs Lockstep {ours}, but {named(caller)} runs {theirs}; install the same version"


def link_not_expected(task: TaskId, caller: str) -> str:
    return f"{named(task)} does not expect a link from {named(caller)}; give every task the same host lists"


def jobs_differ(caller: str, theirs: JobId, task: TaskId, ours: JobId) -> str:
    return f"{named(caller)} belongs to job {theirs:016x}, {named(task)} to job {ours:016x}; end the older one"


def taken_by_another(caller: str) -> str:
    return (
        f"another process is already {named(caller)}; two tasks were started with the same --job_name and "
        "--task_index, or an old one is still running"
    )


def former_life_silent(task: TaskId) -> str:
    return f"another incarnation of {named(task)} has a link that is silent, and has yet to be given up"


def place_taken(task: TaskId) -> str:
    return f"the job is already running with another incarnation of {named(task)}, which has taken its place"


def not_told_of_life(task: TaskId, peer: TaskId) -> str:
    return f"{named(task)} has not been notified yet of this incarnation of {named(peer)}"


def yet_to_leave(task: TaskId) -> str:
    return f"{named(task)} has not left the earlier incarnation of the job yet"


def runs_with_another_life(task: TaskId) -> str:
    return f"the job is already running with another incarnation of {named(task)}; start the whole job again"


# -- the last steps --


def part_of_step(part: Part, step: Step) -> str:
    return f"{part}, step {step}"


# -- who is missing --


def waits_for_missing(task: TaskId, missing: str, address: str, finding: str, attempts: int) -> str:
    return f"{named(task)} is waiting for {named(missing)}: {address} {finding} (tried {attempts} times)"


def waits_for_more(task: TaskId, missing: Sequence[str]) -> str:
    return f"{named(task)} is waiting for {len(missing)} more: {', '.join(named(one) for one in missing)}"


def is_lost(task: TaskId, lost: str, finding: str) -> str:
    return f"{named(task)}: {named(lost)} is lost: it {finding}"


def has_come_back(task: TaskId, peer: TaskId) -> str:
    return f"{named(task)}: {named(peer)} has come back as a new incarnation; the job goes on with it"


def had_finished(task: TaskId) -> str:
    return f"{named(task)} had finished its work in its earlier incarnation, and the job is over"


def came_back_too_late(task: TaskId, *, ok: bool) -> str:
    how = "the job ended" if ok else "the job failed"
    return f"{how} before {named(task)} could come back to it; the other tasks have left"


def does_not_return(task: TaskId, doing: str) -> str:
    return f"{named(task)} does not return from {doing}; its process is ended"


def report_unreadable(error: Exception) -> str:
    return f"the coordinator sent a report that cannot be read: {error}"


def drifted(chief: TaskId, parameter: str) -> str:
    return (
        f"has other values than {named(chief)} in {parameter!r}: a program changes parameters on one rank only; change "
        "them on every rank, or call job.publish() on every rank after the change"
    )


def replica_changed(*, has_one: bool) -> str:
    if has_one:
        return "every server's shard has a second home again: the loss of any one server would be survived"
    return (
        "a server is lost, and another has taken its place; there is no replica until its next life, or a server that "
        "is left, is filled"
    )
