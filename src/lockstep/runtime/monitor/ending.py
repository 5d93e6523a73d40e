"""What to say of the end of a task, and with which code to end after it."""

from __future__ import annotations

import signal
from typing import Final

from lockstep.errors import EXIT_FAILED
from lockstep.runtime.monitor.oom import OomWitness
from lockstep.runtime.processes import signal_name

_HINTS: Final[dict[int, str]] = {
    signal.SIGSEGV: "a crash in native code: run it with PYTHONFAULTHANDLER=1 to see the Python lines it came from",
    signal.SIGBUS: "often a shared memory file system that is full: look at df /dev/shm",
    signal.SIGABRT: "a native library gave up: its reason is in the lines above",
    signal.SIGILL: "native code with an instruction that this processor does not have",
    signal.SIGFPE: "an arithmetic error in native code",
    signal.SIGXCPU: "its limit of processor time is used up: see ulimit -t",
}


def exit_code_after(task_exit_code: int, stopped_by: int | None) -> int:
    """The code to end with: 128 and the signal where somebody asked for the end, else the task's own."""
    if stopped_by is not None:
        return 128 + stopped_by
    return EXIT_FAILED if task_exit_code < 0 else task_exit_code


def describe_death(name: str, pid: int, signum: int, witness: OomWitness) -> str:
    """One line on a task that was killed by a signal that its monitor did not send."""
    return f"{name} (pid {pid}) was killed by {signal_name(signum)}; {_hint(signum, witness)}"


def _hint(signum: int, witness: OomWitness) -> str:
    if signum == signal.SIGKILL:
        evidence = witness.evidence()
        if evidence is not None:
            return f"probably for lack of memory: {evidence}"
        if witness.readable:
            return "not for lack of memory, as far as the kernel's counters show, but by a person or another program"
        return "by a person, another program, or the kernel for lack of memory (its counters cannot be read here)"
    return _HINTS.get(signum, "sent by another process")
