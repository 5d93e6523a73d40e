"""Python stacks of other processes, by py-spy; and where a stack stands, by its files and functions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from lockstep.flight.recording import StackLine
from lockstep.foreign import JsonError, plain, read_json
from lockstep.runtime.monitor.stack import find_py_spy
from lockstep.watch import injected
from lockstep.watch.sights import Work

STACK_SECONDS: Final = 4.0
_MAX_BYTES: Final = 4 << 20
_MOST_LINES: Final = 60
_AT_ONCE: Final = 4
_MOST_STACKS: Final = 16
"""With a thousand ranks on one host, a few tell what all do."""
_OURS: Final = f"{injected.MODULE}.py"
_JOINING: Final = frozenset({"init_process_group", "rendezvous", "_store_based_barrier", "store_based_barrier"})


def stacks_of(pids: Iterable[int]) -> dict[int, tuple[StackLine, ...]]:
    """The main thread's stack of each of these, innermost first; without those that cannot be read."""
    wanted = list(dict.fromkeys(pids))[:_MOST_STACKS]
    program = find_py_spy()
    if not wanted or program is None:
        return {}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="stacks") as pool:
        found = dict(zip(wanted, pool.map(lambda pid: _stack_of(program, pid), wanted), strict=True))
    return {pid: stack for pid, stack in found.items() if stack}


def _stack_of(program: str, pid: int) -> tuple[StackLine, ...]:
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STACK_SECONDS,
            check=False,
        )
        return main_stack(read_json(done.stdout, _MAX_BYTES), pid) if done.returncode == 0 else ()
    except (OSError, subprocess.TimeoutExpired, JsonError):
        return ()


def main_stack(threads: Any, pid: int) -> tuple[StackLine, ...]:
    """The main thread, in what py-spy has written about a process; of a process, its number is that of its pid."""
    known = [one for one in threads if isinstance(one, dict)] if isinstance(threads, list) else []
    main = next((one for one in known if one.get("os_thread_id") == pid), None)
    main = main or next((one for one in known if one.get("thread_name") == "MainThread"), {})
    frames = main.get("frames")
    return tuple(
        StackLine(plain(str(one.get("name")), 200), plain(str(one.get("filename")), 500), _whole(one.get("line")))
        for one in (frames[:_MOST_LINES] if isinstance(frames, list) else ())
        if isinstance(one, dict) and one.get("short_filename") != _OURS
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def work_of(stack: Sequence[StackLine]) -> Work:
    """Where a main thread stands. A program that waits in a collective may well be in its own line of backward."""
    if not stack:
        return Work.NOT_SEEN
    if any(line.file.endswith("torch/utils/data/dataloader.py") for line in stack):
        return Work.INPUT
    of_torch = [line for line in stack if "torch/distributed/" in line.file]
    if any(line.function in _JOINING for line in of_torch):
        return Work.JOINING
    if of_torch and not stack[0].of_program:
        return Work.COLLECTIVE
    return Work.PROGRAM
