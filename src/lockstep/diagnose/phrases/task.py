"""About a task that is missing, or is not the expected one, and about a link between two hosts."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from lockstep.diagnose.phrases.units import in_brackets as _in_brackets
from lockstep.diagnose.phrases.units import in_seconds as _in_seconds
from lockstep.diagnose.phrases.units import named as _named

# -- a task that has ended --


def how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def ended(task: str, how: str, why: str) -> str:
    return f"{_named(task)} {how}: {why}" if why else f"{_named(task)} {how}"


def monitor_saw_it_end(host: str, pid: int, how: str) -> str:
    return f"its monitor on {host} reports that process {pid} {how}"


def gone_with_its_monitor(task: str) -> str:
    return f"{_named(task)} is gone, and so is its monitor"


def looked_at(address: str, found: str) -> str:
    return f"at {address}: {found}"


def what_others_know(words: Mapping[str, str]) -> str:
    """One entry per word, with the tasks that say it."""
    by_word: dict[str, list[str]] = {}
    for task, word in words.items():
        by_word.setdefault(word, []).append(_named(task))
    found = [f"{', '.join(tasks[:4])}{' and others' * (len(tasks) > 4)}: {word}" for word, tasks in by_word.items()]
    return f"what each task knows of it: {'; '.join(found) or 'no task was asked'}"


def refused_without_proof(task: str) -> str:
    return (
        f"connections to {_named(task)} are refused: either it has ended together with its monitor, or a firewall "
        "resets them; no monitor, no task on its host and no majority of all tasks proves its end"
    )


def ended_for_lack_of_memory(task: str, how: str) -> str:
    return f"{_named(task)} {how} because its host ran out of memory"


def monitor_on(host: str, found: str) -> str:
    return f"its monitor on {host}: {found}"


# -- a task that does not answer --


def is_stopped(task: str, pid: int, host: str, seconds: float) -> str:
    return f"{_named(task)}{_in_brackets(pid, host)} has been stopped for {_in_seconds(seconds)}"


def kernel_has_it_stopped(state: str, seconds: float) -> str:
    return f"its monitor reports the process as {state or 'stopped'} for {_in_seconds(seconds)}"


def has_closed_its_descriptors(task: str, pid: int, host: str) -> str:
    return f"{_named(task)}{_in_brackets(pid, host)} runs, but has closed all its descriptors, and so its connections"


def runs_without_connections(pid: int, state: str, seconds: float) -> str:
    found = state or "alive"
    return f"its monitor has had no connection to process {pid} for {_in_seconds(seconds)}, and finds it {found}"


def keep_descriptors_open() -> str:
    return (
        "Let the program close only what it has opened, not all descriptors of its process; then start the job again."
    )


def host_is_paused(task: str) -> str:
    return f"host paused: the host of {_named(task)} accepts connections, but neither the task nor its monitor answers"


def nothing_from_the_task(waiter: str, task: str, seconds: float) -> str:
    return f"{_named(waiter)} has received nothing from {_named(task)} for {_in_seconds(seconds)}"


def native_code_holds_all_threads(task: str, pid: int, host: str, place: str) -> str:
    at = f", at {place}" if place else ""
    return f"{_named(task)}{_in_brackets(pid, host)} is running, but native code blocks all its Python threads{at}"


def only_its_monitor_answers(state: str, silence: str) -> str:
    return f"its monitor answers and reports it as {state or 'running'}; the task does not: {silence}"


def not_started(task: str) -> str:
    return f"{_named(task)} has not been started"


def ended_before_it_joined(task: str, how: str) -> str:
    return f"{_named(task)} has not joined: it {how}"


def found_at(address: str, found: str) -> str:
    return f"{address}: {found}"


# -- another task than expected --


def another_task_there(address: str, meant: str, found: str, pid: int, host: str) -> str:
    return f"{_named(meant)} is expected at {address}, but {_named(found)}{_in_brackets(pid, host)} is there"


def that_monitor_says_so() -> str:
    return "its own monitor reports this"


def versions_differ(task: str, theirs: str, waiter: str, ours: str) -> str:
    return f"{_named(task)} runs Lockstep {theirs}, but {_named(waiter)} runs {ours}"


def monitor_is_of_version(version: str) -> str:
    return f"its monitor reports version {version}"


def waits_for_a_former_life(task: str, waiter: str, life: str) -> str:
    return f"{_named(task)} was restarted, but {_named(waiter)} is waiting for its earlier incarnation {life}"


def has_another_life_now(life: str, pid: int, host: str) -> str:
    return f"its monitor reports incarnation {life} now{_in_brackets(pid, host)}"


def belongs_to_another_job(task: str, address: str, job: str) -> str:
    return f"{_named(task)} at {address} belongs to another job ({job}) that is still running"


def process_of_the_other_job(pid: int, host: str, phase: str, seconds: float) -> str:
    return f"its monitor: process {pid} on {host} has been {phase} for {_in_seconds(seconds)}"


def started_twice(task: str) -> str:
    return f"{_named(task)} was started twice"


def was_refused_by(task: str, finding: str) -> str:
    return f"{_named(task)} answered: {finding}"


def stopped_early(task: str, steps: int, step: int) -> str:
    return f"{_named(task)} stopped after {steps} steps; the others go on with step {step}"


def was_told_so(waiter: str, task: str) -> str:
    return f"{_named(waiter)} received this from {_named(task)} itself"


# -- links --


def no_packet_though_others_reach_it(task: str, waiter: str) -> str:
    return f"{_named(waiter)} cannot reach {_named(task)}, although other tasks hear from it"


def others_hear_it(others: Sequence[str], task: str, seconds: float) -> str:
    names = ", ".join(_named(other) for other in others)
    return f"{names} heard from {_named(task)} less than {seconds:g} s ago, so it is alive"


def no_packet_comes_back(task: str) -> str:
    return f"no packet comes back from {_named(task)}: its host is down, or the network between the two is cut"


def neither_hears_the_other(waiter: str, task: str) -> str:
    return f"{_named(waiter)} and {_named(task)} are both alive, but nothing passes between them in either direction"


def kernel_counters(task: str, heard: float, unacknowledged: int, segments: int, watched: float) -> str:
    return (
        f"{_named(task)}: last heard from the other side {_in_seconds(heard)} ago; its kernel holds "
        f"{unacknowledged} unacknowledged bytes and received {segments} TCP segments in {_in_seconds(watched)}"
    )


def one_direction_is_cut(speaker: str, listener: str) -> str:
    return f"what {_named(speaker)} sends does not reach {_named(listener)}; the other direction works"
