"""What a test must not leave behind: threads, processes, open descriptors, shared memory.

Some libraries create things once and keep them as long as the process runs; those are known by name and pass.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from helpers.waiting import wait_until
from lockstep.runtime.processes import ProcessFacts, descendants, send_signal

SECONDS = 5.0
"""Threads of gRPC and processes that were just killed take a moment to end."""

_LASTING_THREADS = re.compile(r"pytest_timeout|refusals|tqdm|TMonitor|_poll_wrapper")
_LASTING_DESCRIPTORS = re.compile(
    # Event loops of gRPC, UCX and torch; devices and random numbers, opened once.
    r"anon_inode:.*(eventfd|eventpoll|timerfd|inotify|io_uring).*|/dev/(null|urandom|random|nvidia.*|infiniband/.*|dri/.*)"
    r"|/proc/.*|/sys/.*"
)
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Belongings:
    """What this process had at one moment."""

    threads: frozenset[int]
    processes: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]


def take_stock() -> Belongings:
    """Before a test."""
    return Belongings(
        frozenset(thread.ident or 0 for thread in threading.enumerate()),
        frozenset(facts.pid for facts in _children()),
        frozenset(_descriptors()),
        frozenset(_shared_memory()),
    )


def leaks_since(before: Belongings) -> list[str]:
    """One line for everything that is new and does not go away within seconds."""
    if not _leaks(before):
        return []
    try:
        wait_until(lambda: _is_gone(before), SECONDS, "no leaks")
    except AssertionError:
        return _leaks(before)
    return []


def _is_gone(before: Belongings) -> bool:
    # Every time: a thread that ends meanwhile may leave a cycle behind, with a mapping that keeps a descriptor open.
    gc.collect()
    return not _leaks(before)


def end_leaked_processes(before: Belongings) -> None:
    """So that one test's leak does not spoil the next test."""
    for facts in _children():
        if facts.pid not in before.processes:
            send_signal(facts.pid, signal.SIGKILL)


def _leaks(before: Belongings) -> list[str]:
    found = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread.ident not in before.threads and not _LASTING_THREADS.search(thread.name)
    ]
    found += [
        f"process {facts.pid} ({facts.name}, {facts.state})"
        for facts in _children(before.processes)
        if facts.pid not in before.processes
    ]
    found += [f"descriptor {number} -> {target}" for number, target in _descriptors() - before.descriptors]
    found += [f"shared memory {name}" for name in _orphaned_memory(_shared_memory() - before.shared_memory)]
    return found


def _children(known: frozenset[int] = frozenset()) -> list[ProcessFacts]:
    """Descendants of this process. Adopted ones (it is a subreaper) that have died are reaped here."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []  # by far the most frequent case, and much quicker than looking at every process
    found = []
    for facts in descendants(os.getpid()):
        if facts.state.startswith("dead") and facts.parent == os.getpid() and facts.pid not in known:
            os.waitpid(facts.pid, os.WNOHANG)
        else:
            found.append(facts)
    return found


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of the listing itself
        if not _LASTING_DESCRIPTORS.fullmatch(target):
            found.add((int(entry), target))
    return found


def _shared_memory() -> set[str]:
    """Without what the CUDA driver keeps there for processes that share events, and leaves behind."""
    return {name for name in os.listdir(_SHM) if not name.startswith("cuda.shm.")} if _SHM.exists() else set()


def _orphaned_memory(names: set[str]) -> list[str]:
    """Those that no other live process uses: other programs may use shared memory too."""
    if not names:
        return []
    ours = {os.getpid(), *(facts.pid for facts in _children())}
    used: set[str] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) in ours:
            continue
        try:
            maps = Path(f"/proc/{entry}/maps").read_text(errors="replace")
        except OSError:
            continue
        used |= {name for name in names if f"{_SHM}/{name}\n" in maps}
    return sorted(names - used)
