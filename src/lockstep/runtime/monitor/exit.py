"""The end of a task: how to ask for it, what to report about it, and how long a monitor answers for it afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Final

from lockstep.errors import EXIT_FAILED
from lockstep.protocol.core.timing import ANSWERED_FOR_SECONDS, SAME_SIGNAL_SECONDS, TELL_SECONDS
from lockstep.runtime.monitor.freezer import task_facts
from lockstep.runtime.monitor.oom import OomWitness, find_counters
from lockstep.runtime.processes import SignalInbox, signal_name, wait_readable

if TYPE_CHECKING:
    # Most readers need only what signals mean, and must not wait until gRPC is imported.
    from lockstep.runtime.monitor.record import TaskRecord

_HINTS: Final[dict[int, str]] = {
    signal.SIGSEGV: "a crash in native code: run it with PYTHONFAULTHANDLER=1 to see the Python lines that led to it",
    signal.SIGBUS: "often because a shared memory file system is full: check df /dev/shm",
    signal.SIGABRT: "a native library gave up: its reason is in the lines above",
    signal.SIGILL: "native code used an instruction that this processor does not have",
    signal.SIGFPE: "an arithmetic error in native code",
    signal.SIGXCPU: "it has used up its limit of processor time: see ulimit -t",
}


# -- asking for it --


class Action(Enum):
    """What to do with the child processes."""

    ASK = "ask"
    KILL = "kill"


class Stopping:
    """What stop signals mean: the first requests an orderly end; the second, or too long a wait, kills."""

    def __init__(self, patience: float, by_signal: Mapping[int, float] | None = None) -> None:
        """``by_signal``: other times for the end that a signal asks for."""
        self._patience = patience
        self._by_signal = by_signal or {}
        self._asked_at = 0.0
        self._killed = False
        self.signum: int | None = None
        """The first stop signal; None until one comes."""

    def on_signal(self, signum: int, now: float) -> Action | None:
        """What this signal asks for; None if it is a repetition."""
        if self.signum is None:
            self.signum, self._asked_at = signum, now
            return Action.ASK
        if self._killed or now - self._asked_at < SAME_SIGNAL_SECONDS:
            return None
        self._killed = True
        return Action.KILL

    def on_time(self, now: float) -> Action | None:
        """KILL, once, when patience has run out."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return None
        self._killed = True
        return Action.KILL

    def next_deadline(self) -> float | None:
        """When to call ``on_time`` next."""
        if self.signum is None or self._killed:
            return None
        return self._asked_at + self.patience

    def patience_from_now(self, seconds: float) -> None:
        """The requested end may take this long."""
        self._patience = seconds

    @property
    def patience(self) -> float:
        """How long the requested end may take."""
        return self._patience if self.signum is None else self._by_signal.get(self.signum, self._patience)


# -- reporting it --


class TaskObserver:
    """Observes one task from outside until its end. A monitor and a sidecar have one each."""

    def __init__(self, name: str, record: TaskRecord) -> None:
        self._name = name
        self._record = record
        self._witness = OomWitness(find_counters(), time.monotonic())

    def look(self) -> None:
        """Note what the kernel shows of the task; call it often."""
        self._witness.sample(time.monotonic())
        if (facts := task_facts(self._record.pid)) is not None:
            self._record.on_state(stopped=facts.stopped)

    def death(self, exit_code: int) -> str:
        """One line about a task that was killed by a signal that its monitor did not send."""
        return describe_death(self._name, self._record.pid, -exit_code, self._witness)

    def ended(self, exit_code: int) -> int:
        """Record the end; returns the number of this change, for ``linger``."""
        if exit_code == -signal.SIGKILL:
            self._record.out_of_memory = self._witness.evidence()
        return self._record.on_exited(exit_code)


def exit_code_after(task_exit_code: int, stopped_by: int | None) -> int:
    """The monitor's own exit code: 128 plus the signal that asked for the end, else the task's."""
    if stopped_by is not None:
        return 128 + stopped_by
    return EXIT_FAILED if task_exit_code < 0 else task_exit_code


def describe_death(name: str, pid: int, signum: int, witness: OomWitness) -> str:
    """One line about a task that was killed by a signal that its monitor did not send."""
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


# -- answering for it --


def linger(record: TaskRecord, number: int, quiet: bool, seconds: float, inbox: SignalInbox | None) -> None:
    """Wait until all watchers have received change ``number``, the end of the task, or a signal arrives in ``inbox``.

    After a quiet end that is all. After a failure it takes up to ``seconds``, and ends earlier only if there were
    watchers.
    """
    ended = time.monotonic()
    watched = False
    while True:
        waited = time.monotonic() - ended
        watched = watched or record.changed.watchers() > 0
        told = record.changed.everyone_has(number)
        if quiet and (told or waited >= TELL_SECONDS):
            return
        if waited >= seconds or (watched and told and waited >= ANSWERED_FOR_SECONDS):
            return
        wait_readable(set() if inbox is None else {inbox.fileno()}, 0.02)
        if inbox is not None and inbox.take():
            return
