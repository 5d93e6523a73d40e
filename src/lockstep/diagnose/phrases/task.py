"""About a task that is not there, or not the one that was meant, and about a link between two hosts."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from lockstep.diagnose.phrases.units import in_seconds as _in_seconds

# -- a task that has ended --


def how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def ended(task: str, how: str, why: str) -> str:
    return f"{task} {how}: {why}" if why else f"{task} {how}"


def monitor_saw_it_end(host: str, pid: int, how: str) -> str:
    return f"its monitor on {host} says that process {pid} {how}"


def gone_with_its_monitor(task: str) -> str:
    return f"{task} is gone, and its monitor too"


def looked_at(address: str, found: str) -> str:
    return f"at {address}: {found}"


def ended_for_lack_of_memory(task: str, how: str) -> str:
    return f"{task} {how} for lack of memory"


def monitor_on(host: str, found: str) -> str:
    return f"its monitor on {host}: {found}"


# -- a task that does not answer --


def is_stopped(task: str, pid: int, host: str) -> str:
    return f"{task} is stopped (process {pid} on {host})"


def kernel_has_it_stopped(state: str, seconds: float) -> str:
    return f"its monitor says that the kernel has it {state or 'stopped'} for {_in_seconds(seconds)}"


def native_code_holds_all_threads(task: str, pid: int) -> str:
    return f"{task} runs (process {pid}), but native code keeps all its Python threads from running"


def only_its_monitor_answers(state: str, silence: str) -> str:
    return f"its monitor answers and has it as {state or 'running'}; the task does not: {silence}"


def not_started(task: str) -> str:
    return f"{task} has not been started"


def found_at(address: str, found: str) -> str:
    return f"{address}: {found}"


# -- another task than was meant --


def another_task_there(address: str, meant: str, found: str, pid: int, host: str) -> str:
    return f"{address} should be {meant} and is {found} (process {pid} on {host})"


def that_monitor_says_so() -> str:
    return "the monitor there says so itself"


def versions_differ(task: str, theirs: str, waiter: str, ours: str) -> str:
    return f"{task} runs Lockstep {theirs}, {waiter} runs {ours}"


def monitor_is_of_version(version: str) -> str:
    return f"its monitor says that it is of version {version}"


def waits_for_a_former_life(task: str, waiter: str, life: str) -> str:
    return f"{task} was started again: {waiter} waits for life {life}, which is over"


def has_another_life_now(life: str, pid: int, host: str) -> str:
    return f"its monitor has life {life} now (process {pid} on {host})"


def belongs_to_another_job(task: str, address: str, job: str) -> str:
    return f"{task} at {address} belongs to another job ({job}), which still runs"


def process_of_the_other_job(pid: int, host: str, phase: str, seconds: float) -> str:
    return f"its monitor: process {pid} on {host} is {phase} since {_in_seconds(seconds)}"


def started_twice(task: str) -> str:
    return f"{task} was started twice"


def was_refused_by(task: str, finding: str) -> str:
    return f"{task} said: {finding}"


def stopped_early(task: str, steps: int, step: int) -> str:
    return f"{task} stopped after {steps} steps; the others go on with step {step}"


def was_told_so(waiter: str, task: str) -> str:
    return f"{waiter} was told so by {task} itself"


# -- links --


def no_packet_though_others_reach_it(task: str, waiter: str) -> str:
    return f"no packet comes back from {task} to {waiter}, though others reach it"


def others_hear_it(others: Sequence[str], task: str, seconds: float) -> str:
    return f"{', '.join(others)} heard {task} less than {seconds:g} s ago: it lives"


def no_packet_comes_back(task: str) -> str:
    return f"no packet comes back from {task}: its host is down, or the network between the two is cut"


def neither_hears_the_other(waiter: str, task: str) -> str:
    return f"{waiter} and {task} both live, but neither hears the other"


def kernel_counters(task: str, heard: float, unacknowledged: int, segments: int, watched: float) -> str:
    return (
        f"{task}: last heard {_in_seconds(heard)} ago; its kernel holds {unacknowledged} bytes without an "
        f"acknowledgement and got {segments} TCP segments in {_in_seconds(watched)}"
    )


def one_direction_is_cut(speaker: str, listener: str) -> str:
    return f"what {speaker} sends does not reach {listener}; the other direction works"
