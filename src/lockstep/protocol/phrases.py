"""What the machines tell people, one function per sentence. Nothing reads these back."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.foreign import plain
from lockstep.protocol.core.ids import Role, Step, TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import CallMade, Join, MissingTask, ParameterEntry
from lockstep.protocol.core.waits import Wait, WaitKind

# -- tasks --


def named(task: TaskId | str) -> str:
    """``worker 1``, ``server 0``: a task in a sentence. What is not the name of a task stays as it is."""
    try:
        found = task if isinstance(task, TaskId) else TaskId.parse(task)
    except ValueError:
        return str(task)
    return f"{'server' if found.role is Role.SERVER else 'worker'} {found.index}"


# -- waits --

_WAITED_FOR = {
    WaitKind.CONNECTION: "a connection",
    WaitKind.JOINING: "it to join",
    WaitKind.COMPLETE: "the cluster to be complete",
    WaitKind.RETURN: "it to come back",
    WaitKind.END: "the end of the job",
    WaitKind.OWN_STEP: "its own step",
}


def waited_for(wait: Wait) -> str:
    """What a wait is for: the tensor's key, or a few words."""
    if wait.key is not None:
        return str(wait.key)
    match wait.kind:
        case WaitKind.COMMIT:
            return f"the commit of step {wait.step}"
        case WaitKind.APPLIED:
            return applied_word(wait.step)
        case WaitKind.STATE:
            return f"its state before step {wait.step + 1}"
        case WaitKind.NORM:
            return f"the norm of the mean gradient of step {wait.step}"
        case _:
            return wait.detail or _WAITED_FOR.get(wait.kind, wait.kind.value)


def applied_word(step: Step) -> str:
    return f"its message that step {step} is applied"


def wait_line(wait: Wait, now: float) -> str:
    return (
        f"{named(wait.waiter)} has been waiting {max(0.0, now - wait.since):.1f} s for {named(wait.on)}: "
        f"{waited_for(wait)}, step {wait.step} ({wait.state})"
    )


def buckets_outstanding(asked: str, count: int) -> str:
    return f"{asked}, {count} {'bucket' if count == 1 else 'buckets'} outstanding"


def asked_for() -> str:
    return "asked for"


def requested() -> str:
    return "requested"


def not_connected() -> str:
    return "not connected"


def means_are_here() -> str:
    return "every mean is here, and others may lack some"


def applied_here_only() -> str:
    return "applied here, not everywhere"


def applied_everywhere() -> str:
    return "the step is applied everywhere"


def norm_told() -> str:
    return "the norm is known, and the step has not gone on"


def norm_asked_for() -> str:
    return "other workers have asked for it"


def norm_measured_here() -> str:
    return "measured here"


def norm_measured_elsewhere() -> str:
    return "measured on other servers"


def shard_of(version: int | None) -> str:
    return f"its shard of version {version}"


def handed_over() -> str:
    return "handed over here, not summed"


# -- calls that all workers make --


def call_words(made: CallMade) -> str:
    """``all_reduce 'val_loss' (train.py:31)``; without a name of its own, a call is named by its line."""
    name = "" if made.name == made.where else f" {made.name!r}"
    return plain(f"{made.operation}{name} ({made.where})")


def _whole_call(made: CallMade) -> str:
    return f"{call_words(made)}{f', {made.form}' if made.form else ''}"


def has_not_come() -> str:
    return "it has not come"


def calls_differ(task: TaskId, made: CallMade, other: TaskId, theirs: CallMade) -> str:
    return plain(
        f"{named(task)} is in {_whole_call(made)}, where {named(other)} is in {_whole_call(theirs)}; let all workers "
        "make the same calls in the same order, from the same line or with the same name"
    )


def finished_without_call(task: TaskId, other: TaskId, theirs: CallMade) -> str:
    return plain(
        f"{named(task)} has finished, but {named(other)} is waiting for it in {call_words(theirs)}; let all workers "
        "make the same calls"
    )


def call_is_forgotten(task: TaskId, made: CallMade, limit: int) -> str:
    return plain(
        f"{named(task)} has come back and makes {call_words(made)} again, whose result is no longer kept: at most "
        f"{limit >> 20} MiB are; make fewer or smaller calls outside job.steps()"
    )


# -- forming --


def index_taken(task: TaskId, holder: Join, join: Join) -> str:
    return (
        f"{named(task)} is already running as process {holder.pid} on {holder.host}; "
        f"give process {join.pid} on {join.host} another --task_index"
    )


def job_runs_already(task: TaskId, holder: Join) -> str:
    return (
        f"the job is already running with another {named(task)} (process {holder.pid} on {holder.host}); "
        "end that job first, or give this task another index"
    )


def setting_differs(name: str, task: str, theirs: str | None, other: TaskId, ours: str | None) -> str:
    return plain(
        f"{named(task)} has {name}={'(none)' if theirs is None else theirs}, "
        f"{named(other)} has {name}={'(none)' if ours is None else ours}; start all tasks with the same value"
    )


def an_address() -> str:
    return "its address"


def not_looked_for() -> str:
    return "not looked for yet"


def not_reached(seconds: float) -> str:
    return f"could not be reached within {seconds:.0f} s"


def join_not_answered(seconds: float) -> str:
    return f"did not answer a request to join within {seconds:.0f} s"


def cluster_not_complete(seconds: float, missing: Sequence[MissingTask]) -> str:
    names = ", ".join(f"{named(one.task)} at {one.address} ({one.finding})" for one in missing)
    return f"the cluster was not complete after {seconds:.0f} s; missing: {names}"


# -- losses --


def did_not_come_back(reason: str, seconds: float) -> str:
    return f"{reason}; it did not come back within {seconds:.0f} s"


def cannot_be_taken_back(reason: str, stuck: str) -> str:
    return f"{reason}; it cannot rejoin: {stuck}"


def waited_for_to_come_back(reason: str, seconds: float) -> str:
    return f"{reason}; waiting up to {seconds:.0f} s for it to come back"


def started_again() -> str:
    return "was started again"


def goes_on_without(reason: str) -> str:
    return f"{reason}; the job goes on without it"


# -- signals --


def received(departure: Departure) -> str:
    """Follows the name of the task."""
    return f"received {departure.name}{' (Ctrl-C)' if departure is Departure.SIGINT else ''}"


def left(departure: Departure) -> str:
    return f"{received(departure)} and left"


def leaves(departure: Departure) -> str:
    return f"{received(departure)} and leaves"


def ended_the_job(departure: Departure) -> str:
    return f"{received(departure)} and ended the job"


def saved_before_the_end(ended: str, version: int) -> str:
    return f"{ended}; version {version} is saved"


def not_saved_before_the_end(ended: str) -> str:
    return f"{ended}; its last steps are not saved"


# -- training --


def model_differs(task: TaskId, difference: str | None) -> str:
    return (
        f"the model of {named(task)} differs from the chief's: {difference or 'other buckets or servers'}; "
        "build the same model with the same settings on every worker"
    )


def starts_with_another_model(difference: str) -> str:
    return f"starts with a different model from the chief's: {difference}"


def other_calls(step: Step, occasion: str, other: TaskId, others: str) -> str:
    return (
        f"reached step {step} with {occasion}, but {named(other)} with {others}; "
        "every worker must make the same calls in the same order"
    )


def stopped_early(task: TaskId, steps: Step, other: TaskId, step: Step) -> str:
    return (
        f"{named(task)} stopped after {steps} steps while {named(other)} goes on with step {step}; "
        "give every worker the same number of steps"
    )


def bucket_is_past(bucket: int, version: int) -> str:
    return f"bucket {bucket} is already at version {version}"


def opened_too_early(peer: TaskId, opened: Step, task: TaskId, step: Step) -> str:
    return f"{named(peer)} opened step {opened} while {named(task)} is in step {step}"


def parameter_differs(index: int, one: ParameterEntry, other: ParameterEntry) -> str:
    return f"parameter {index} is {_described(one)} on one side and {_described(other)} on the other"


def more_parameters(ours: int, theirs: int, extra: ParameterEntry) -> str:
    return f"one side has {ours} parameters, the other {theirs}; the first extra one is {_described(extra)}"


def _described(entry: ParameterEntry) -> str:
    return f"{plain(entry.name)!r} ({entry.elements} x {entry.dtype}, group {entry.group})"


def lacks_untrained(name: str) -> str:
    return f"only the chief has {plain(name)}; build the same model, and freeze the same parameters, on every worker"


def untrained_differs(name: str) -> str:
    return (
        f"{plain(name)}, which is not trained, has different values; "
        "seed the random numbers, or load the same file, before building the model on every worker"
    )


def chief_lacks_untrained(name: str) -> str:
    return (
        f"the chief does not have {plain(name)}; build the same model, and freeze the same parameters, on every worker"
    )


def not_its_to_send(message: str) -> str:
    return f"{message} is not this task's to send"


# -- second homes --


def handed_on() -> str:
    return "handed on"


def told_of_a_decision() -> str:
    return "told of a decision"


def both_homes_lost(task: TaskId) -> str:
    return plain(f"{named(task)} has ended, and no other server holds all that it held")


def was_replaced(coordinator: TaskId) -> str:
    return plain(f"could not be reached, and the job goes on without it; {named(coordinator)} coordinates it")


def homes_differ(home: TaskId, second: TaskId, step: int) -> str:
    made = f"{named(home)} and {named(second)} made step {step} of the same gradients, and their bits differ"
    return plain(f"{made}; which of the two is wrong is not known")
