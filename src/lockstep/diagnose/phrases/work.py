"""About a task that answers: what its training thread, its loop or its store is doing."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.diagnose.phrases.units import in_seconds as _in_seconds
from lockstep.diagnose.phrases.units import named as _named


def _in_step(step: int) -> str:
    return f"in step {step}" if step >= 0 else "before the first step"


# -- the training thread --


def stands_still_in_user_code(task: str, step: int, place: str) -> str:
    at = f", at {place}" if place else ""
    return f"the training thread of {_named(task)} is stuck in user code {_in_step(step)}{at}"


def computes_without_end(task: str, step: int, place: str) -> str:
    return f"the training thread of {_named(task)} is computing {_in_step(step)} and does not leave {place}"


def stacks_have_in_common(place: str, seconds: float) -> str:
    return f"all stacks taken in the course of {_in_seconds(seconds)} are in {place}"


def announced_that_it_is_busy(task: str, what: str) -> str:
    return f"{_named(task)} is busy, as its program announced: {what or 'no reason given'}"


def compiles(task: str, step: int) -> str:
    return f"{_named(task)} is compiling {_in_step(step)}"


def stack_is_in_the_compiler(task: str) -> str:
    return f"{_named(task)}: its stack is inside the compiler"


def did_no_work(task: str, doing: str, seconds: float) -> str:
    return f"{_named(task)}: {doing} for {_in_seconds(seconds)}, but the thread used no CPU in the last two seconds"


def stands_in_a_device_call(task: str, step: int) -> str:
    return f"the training thread of {_named(task)} does not return from a device call {_in_step(step)}"


def stack_is_in_the_device_library(task: str, doing: str, seconds: float) -> str:
    return f"{_named(task)}: {doing} for {_in_seconds(seconds)}; its stack is inside the device library"


def its_input() -> str:
    return "its input"


def has_no_data(task: str, step: int, source: str) -> str:
    return f"{_named(task)} has no data for step {step}: it is waiting for {source}"


def reads_since(task: str, source: str, seconds: float) -> str:
    return f"{_named(task)} has been reading {source} for {_in_seconds(seconds)}"


def input_is_stopped(task: str, step: int, pids: tuple[int, ...]) -> str:
    of = f"process {pids[0]} that reads it is" if len(pids) == 1 else f"processes {_list(pids)} that read it are"
    return f"{_named(task)} has no data for step {step}: the {of} stopped"


def _list(pids: tuple[int, ...]) -> str:
    return ", ".join(map(str, pids))


def reader_is(pid: int, state: str) -> str:
    return f"process {pid}, which reads its data, is {state}"


def resume_input(pids: tuple[int, ...]) -> str:
    return f"Resume reading with: kill -CONT {' '.join(map(str, pids))}"


def input_is_slow(task: str, step: int, source: str, rate: float, share: float) -> str:
    return (
        f"{_named(task)} is still reading its data for step {step}, now {source}: {rate:.2g} records per second, "
        f"{share:.0%} of this step so far"
    )


def records_read(records: int, seconds: float, ago: float) -> str:
    return f"{records} records were read in {_in_seconds(seconds)}, the last {_in_seconds(ago)} ago"


def faster_input() -> str:
    return "Check the disk or the mount of that file, copy the data to a local disk, or use more processes to read it."


def still_computes(task: str, step: int) -> str:
    return f"{_named(task)} is still computing step {step}, which the others have finished"


def thread_used_the_processor(share: float) -> str:
    return f"its training thread used {share:.0%} of a CPU in the last two seconds"


# -- checkpoints --


def disk_is_full(task: str, folder: str) -> str:
    return f"{_named(task)} cannot write its checkpoint: the disk of {folder} is full"


def room_left(folder: str, host: str, free: int) -> str:
    return f"{folder} on {host} has {free} bytes left"


def checkpoint_stands_still(task: str, file: str) -> str:
    return f"{_named(task)} is stuck writing its checkpoint to {file or 'its file'}"


def no_byte_written(task: str, seconds: float, written_ago: float) -> str:
    return (
        f"{_named(task)} has been writing for {_in_seconds(seconds)}, "
        f"but no byte was written in the last {_in_seconds(written_ago)}"
    )


def still_writes_its_checkpoint(task: str, file: str) -> str:
    return f"{_named(task)} is still writing its checkpoint {file}"


def wrote(ago: float) -> str:
    return f"it last wrote {_in_seconds(ago)} ago"


# -- a server's store --


def server_is_busy(task: str, doing: str, seconds: float) -> str:
    return f"{_named(task)} has been busy for {_in_seconds(seconds)}: {doing}"


def update_thread_used_the_processor(share: float, queued: int) -> str:
    return f"its update thread used {share:.0%} of a CPU; {queued} more updates are queued"


def loop_is_behind(task: str, queued: int) -> str:
    return f"{_named(task)} is overloaded: {queued} events are queued for its loop"


def says_so_itself(task: str) -> str:
    return f"{_named(task)} reports this itself"


def update_stands_in_a_device_call(task: str, doing: str) -> str:
    return f"the update thread of {_named(task)} is stuck in a device call: {doing}"


def update_stands_in_the_communication_layer(task: str, doing: str) -> str:
    return f"the update thread of {_named(task)} is stuck in the communication layer: {doing}"


def busy_without_the_processor(seconds: float) -> str:
    return f"busy for {_in_seconds(seconds)} without using the CPU"


# -- the loop and its callbacks --


def loop_does_not_come_back(task: str, event: str) -> str:
    return f"the loop of {_named(task)} does not return from: {event or 'an event'}"


def event_takes(task: str, seconds: float, queued: int) -> str:
    return f"{_named(task)}: this event has taken {_in_seconds(seconds)} so far; {queued} more are queued"


def callback_blocks_the_link(task: str, peer: str, callback: str) -> str:
    return f"a callback in {_named(task)} blocks the link to {_named(peer)}: {callback}"


def callback_has_not_returned(task: str, callback: str, seconds: float) -> str:
    return f"{_named(task)}: {callback}, which has not returned for {_in_seconds(seconds)}"


# -- deadlocks --


def wait_for_one_another(ring: Sequence[str]) -> str:
    return f"these tasks are waiting for each other: {' -> '.join(_named(task) for task in ring)}"


def each_says_so_itself() -> str:
    return "each of them reports this itself"


def is_elsewhere(caller: str, call: str, other: str, doing: str, place: str) -> str:
    at = f", at {place}" if place else ""
    waits = f"waits for {doing}" if doing else "waits for something else"
    return f"{_named(caller)} waits in {call}, while {_named(other)} {waits}{at}, which needs {_named(caller)}"


def waits_for_what_it_must_make(task: str, version: int, step: int) -> str:
    return f"{_named(task)} is waiting for version {version}, which needs its own gradient of step {step}"


def waits_before_its_gradient(task: str, what: str, seconds: float, bucket: int) -> str:
    waiting = f"{_named(task)}: waiting for {what or 'parameters'} for {_in_seconds(seconds)}"
    return f"{waiting}; bucket {bucket} has no gradient yet"


def cannot_make_version(task: str, version: int) -> str:
    return f"{_named(task)}: cannot make version {version} without it"
