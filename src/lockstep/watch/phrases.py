"""What a watched job's reports say, one function per sentence. Nothing reads these back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from lockstep.flight.phrases import ranks, stack_line
from lockstep.flight.recording import StackLine
from lockstep.runtime.processes import signal_name


def _at(place: StackLine | None) -> str:
    return "" if place is None else f", at {stack_line(place)}"


def whom(rank: int, pid: int, host: str) -> str:
    """``rank 1 (pid 4711 on node3)``, as far as it is known."""
    where = " on ".join(part for part in (f"pid {pid}" if pid else "", host) if part)
    return f"rank {rank} ({where})" if where else f"rank {rank}"


def how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "is gone, and nobody knows how it ended"
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"has ended with exit code {exit_code}"


def died(who: str, exit_code: int | None) -> str:
    return f"{who} {how_it_ended(exit_code)}"


def failed(who: str, error: str, place: str) -> str:
    where = f" at {short_place(place)}" if place else ""
    return f"{who} has ended by an error{where}: {error}"


def short_place(place: str) -> str:
    """``main (/a/b/train.py:3)`` with the last folder only."""
    function, _, rest = place.partition(" (")
    return f"{function} ({'/'.join(PurePath(rest).parts[-2:])}" if rest else place


def left_early(who: str) -> str:
    return f"{who} has left: it ended without an error, and the others still need it"


def remedy_left_early() -> str:
    return "Give every rank the same number of steps (drop_last, the same sampler), or use torch's Join."


def frozen(who: str) -> str:
    return f"{who} is stopped, by a signal or a debugger"


def remedy_frozen(pid: int) -> str:
    return f"Resume it with: kill -CONT {pid}" if pid else "Resume it, or end it."


def kernel_says(rank: int, state: str) -> str:
    return f"the kernel says of rank {rank}: {state}"


def waits_idle(who: str, place: StackLine | None) -> str:
    return f"{who} waits in its own program{_at(place)}"


def computes(who: str, place: StackLine | None) -> str:
    return f"{who} computes in its own program{_at(place)}; it may be a long evaluation, or a loop without an end"


def native_code(who: str, place: StackLine | None) -> str:
    return f"native code of {who} keeps Python's interpreter lock{_at(place)}"


def used_processor(rank: int, share: float) -> str:
    return f"rank {rank} has used {share:.0%} of one processor since the last look"


def no_sign(rank: int, seconds: float) -> str:
    return f"no thread of rank {rank} has had the interpreter for {seconds:.0f} s"


def remedy_program(pid: int) -> str:
    return f"Look at that line; the whole stack: py-spy dump --pid {pid}" if pid else "Look at that line."


def starved(who: str, stopped: Sequence[int], dead: Sequence[int]) -> str:
    if stopped:
        return f"{who} waits for its DataLoader, whose process {_listed(stopped)} is stopped"
    if dead:
        return f"{who} waits for its DataLoader, whose process {_listed(dead)} is dead"
    return f"{who} waits for its DataLoader, and none of its processes works"


def slow_input(who: str) -> str:
    return f"{who} waits for its DataLoader, which is at work"


def _listed(pids: Sequence[int]) -> str:
    return ", ".join(str(pid) for pid in pids[:4])


def remedy_starved(stopped: Sequence[int]) -> str:
    if stopped:
        return f"Resume it with: kill -CONT {' '.join(str(pid) for pid in stopped)}"
    return "Look at the data: the disk or network that it comes from, and the memory that its processes may use."


def never_started(missing: Sequence[int], world: int) -> str:
    return f"no process of {ranks(missing)} (of {world}) has been seen"


def remedy_never_started() -> str:
    return "Start the missing ranks, on every host, with the same address of rank 0."


def joining(waiting: Sequence[int], on: Sequence[int]) -> str:
    return f"the job has not begun: {ranks(waiting)} wait in init_process_group for {ranks(on)}"


def nothing_moves(on: int, step: int) -> str:
    in_step = f" after step {step}" if step else ""
    return f"no step ends{in_step}: rank {on} is in no collective"


def job_lost(rank: int, step: int) -> str:
    return f"the job has lost rank {rank}{f' after step {step}' if step else ''}"


def link_cut(who: str, address: str, waiting: int, retransmits: int) -> str:
    return (
        f"nothing gets through from {who} to {address}: {waiting} bytes are not acknowledged, and were sent again "
        f"{retransmits} times"
    )


def watcher_silent(host: str) -> str:
    return f"the watcher on {host} does not answer either"


def remedy_link() -> str:
    return "Try to reach one host from the other (ping, nc), and look for a firewall, a cable or a route."


def no_bytes_moved(seconds: float) -> str:
    return f"all members are in it, none is done, and no byte has moved between them for {seconds:.0f} s"


def straggler(who: str, lag: float, calls: int, how_slow: str) -> str:
    return f"{who} enters the collectives {_span(lag)} after the others ({calls} times of late): {how_slow}"


def job_is_slow(step: int, recent: float, usual: float) -> str:
    return f"steps take {_span(recent)} since step {step}, and took {_span(usual)} before"


def job_waits(usual: float, share: float) -> str:
    return f"steps take {_span(usual)}, and {share:.0%} of the time all wait for it"


def _span(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def remedy_straggler() -> str:
    return "Compare that rank's host with the others: other programs on it, its clock rate, its data."


def stands(rank_doing: str, work: str, place: StackLine | None) -> str:
    return "; ".join(part for part in (rank_doing, f"{work}{_at(place)}" if work else "") if part)


def goes_on(step: int, seconds: float) -> str:
    return f"the job goes on: step {step} has ended after {seconds:.0f} s"


def how_far(step: int, ago: float, usual: float) -> str:
    """Of a job of which nothing is wrong, or nothing is proven."""
    if not step:
        return f"no step has ended yet; the last sign of life was {_span(ago)} ago"
    every = f"; a step takes {_span(usual)}" if usual else ""
    return f"all ranks have made {step} steps, the last {_span(ago)} ago{every}"


def stacks_changed(ago: float) -> str:
    return f"the stacks of the ranks last changed {_span(ago)} ago; steps cannot be counted in a job that ran before"


def job_goes_well() -> str:
    return "nothing stands still"


def nothing_proven() -> str:
    return "no step ends, and why is not proven yet"


def no_py_spy() -> str:
    return "py-spy is not installed here: there are no stacks, and no lines of the program; 'pip install py-spy'"


def kept_out(variable: str) -> str:
    return (
        f"{variable}=0 keeps Lockstep out of this job: there are no collectives, steps or names, only processes and "
        "stacks. Unset it to see all."
    )


def nobody_came_in(seconds: float) -> str:
    return (
        f"no rank has let Lockstep in after {seconds:.0f} s: the program does not import torch 2.5 or newer, or Python "
        "ignores PYTHONPATH (-I, -E). Until one does, there are only processes and stacks to go by."
    )


def aborted(grace: float) -> str:
    return f"--abort: the job is ended; what is left of it after {grace:.0f} s is killed"


def attached(found: Sequence[int]) -> str:
    return (
        f"attached to {ranks(found)}: they run without an entry for Lockstep, so there are processes, stacks and the "
        "kernel's connections, but no collectives, steps or names"
    )


def other_host_joined(host: str, found: Sequence[int]) -> str:
    return f"the watcher on {host} has joined, with {ranks(found)}"


def meeting_failed(address: str, why: str) -> str:
    return f"cannot reach the watcher of rank 0 at {address} ({why}); it is tried again"


def cannot_listen(port: int, why: str) -> str:
    return f"watchers of other hosts cannot join: port {port} cannot be used ({why}); give another with --port"


def files_are_in(where: str) -> str:
    return f"the report and the dumps are in {where}; 'lockstep why {where}' shows it again"
