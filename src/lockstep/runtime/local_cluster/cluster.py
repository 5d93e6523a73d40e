"""A whole cluster on this machine: one monitor per task, on free ports, ended together.

The tasks' own protocol ends the job when one of them fails. The launcher only makes sure that this does not take too
long, names the task that failed first, and leaves no process behind, however it ends itself.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED
from lockstep.protocol.core.ids import ClusterShape, Role, TaskId
from lockstep.protocol.core.timing import CLEAN_UP_SECONDS, KILL_SECONDS, MONITOR_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.local_cluster.member import ClusterMember, Deaths
from lockstep.runtime.monitor.exit import Action, Stopping
from lockstep.runtime.monitor.spares import SpareDesk, SparePlan, SparePool
from lockstep.terminal import say_over
from lockstep.transports.control.ports import PortRange
from lockstep.transports.control.ports import ReservedPort as ReservedPort

LOOPBACK: Final = "127.0.0.1"
PORT_ATTEMPTS: Final = 3
TICK_SECONDS: Final = 0.5


Command = Callable[[TaskId, Sequence[str], Sequence[str]], list[str]]
"""The command line of a task, from its name and the addresses of servers and workers; it must run a monitor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalClusterSpec:
    """How many tasks, and how to start each.

    The chief's stdout is shown unchanged, and the stderr of all tasks, each line with the name of its task. The stdout
    of the other tasks is shown only with ``show_all``, or its end if that task fails; ``logs`` is a folder that
    receives all of it, one file per task.
    """

    servers: int
    workers: int
    command: Command
    logs: Path | None = None
    show_all: bool = False
    end_seconds: float = 10.0
    """How long the tasks may take to end on their own after one has failed."""
    finish_seconds: float = 60.0
    """How long servers may take to end after all workers have ended well."""
    grace: float = 0.0
    """How long the tasks may take, after SIGTERM, to finish a step and save it."""
    may_lose_workers: bool = False
    """The job continues without a worker that was killed by a signal, as long as another worker runs."""
    may_lose_a_server: bool = False
    """The job continues without a server that was killed by a signal, as long as another server runs."""
    forming: Callable[[dict[TaskId, str]], AbstractContextManager[None]] | None = None
    """Shows how the tasks at these addresses come together, while they run."""
    ports: PortRange | None = None
    """Where the tasks listen; None: at ports that the kernel chooses."""
    spares: SparePlan | None = None
    """Processes that wait to take the place of a lost task, whichever it is."""
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """A context that is entered before the first task starts and left after the last one has ended."""


def run_local_cluster(spec: LocalClusterSpec) -> int:
    """Run all tasks to their end; returns 0, or the exit code of the task that failed first.

    Call it on the main thread of a process that ends afterwards: it handles signals (and ignores them when it is done)
    and reaps every child. Ctrl-C ends all tasks and returns 130.
    """
    with processes.SignalInbox(processes.STOP_SIGNALS, until_exit=True) as inbox:
        processes.become_subreaper()
        for _ in range(PORT_ATTEMPTS):
            with _Launcher(spec, inbox) as launcher:
                show = contextlib.nullcontext() if spec.forming is None else spec.forming(launcher.addresses())
                with spec.around(), contextlib.ExitStack() as shown:
                    shown.enter_context(show)
                    code = launcher.run(shown.close)
            if code is not None:
                return code
            say_over("another program has just taken one of the ports; starting again on other ports")
    say_over(f"another program took a port on {LOOPBACK} in each of {PORT_ATTEMPTS} attempts; end that program")
    return EXIT_BAD_INPUT


class _Launcher:
    """One attempt: all tasks on one set of ports."""

    def __init__(self, spec: LocalClusterSpec, inbox: processes.SignalInbox) -> None:
        self._spec = spec
        self._inbox = inbox
        self._stopping = Stopping(MONITOR_SECONDS)
        self._deaths = Deaths()
        self._ask_at: float | None = None
        self._kill_at: float | None = None
        self._hide: Callable[[], None] = lambda: None
        self._port_taken = False
        self._overdue = False
        self._failed_before: tuple[ClusterMember, str] | None = None
        """The first failure when overdue tasks were killed; the launcher itself causes the later ones."""
        shape = ClusterShape(spec.servers, spec.workers)
        self._ports = {task: ReservedPort(LOOPBACK, spec.ports) for task in shape.tasks()}
        servers = [self._ports[task].address for task in shape.server_ids()]
        workers = [self._ports[task].address for task in shape.worker_ids()]
        self._spares = None if spec.spares is None else SparePool(spec.spares, say_over)
        reports: set[str] = set()
        self._members = [
            ClusterMember(
                task,
                self._ports[task].address,
                spec.command(task, servers, workers),
                spec.logs,
                spec.show_all,
                reports,
                None if self._spares is None else SpareDesk(self._spares),
            )
            for task in shape.tasks()
        ]

    def __enter__(self) -> _Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal_all(signal.SIGKILL)
        for member in self._members:
            member.close()
        if self._spares is not None:
            self._spares.close()
        # Reapers whose monitor was killed are adopted here; they end their descendants and then themselves.
        processes.end_descendants(CLEAN_UP_SECONDS, 2 * CLEAN_UP_SECONDS)
        for port in self._ports.values():
            port.close()
        self._deaths.close()

    def addresses(self) -> dict[TaskId, str]:
        """Every task with its address."""
        return {task: port.address for task, port in self._ports.items()}

    def run(self, hide: Callable[[], None]) -> int | None:
        """The exit code; None if a port was taken and all must start again. ``hide`` ends the startup display."""
        self._hide = hide
        for member in self._members:
            member.start()
        while any(member.exit_code is None or member.relays for member in self._members):
            self._wait()
            now = time.monotonic()
            self._take_signals(now)
            self._take_ends(now)
            self._end_in_time(now)
        if self._stopping.signum is not None:
            return 128 + self._stopping.signum
        return None if self._port_taken else self._verdict()

    def _wait(self) -> None:
        watched = {self._inbox.fileno(), self._deaths.fileno()}
        for member in self._members:
            watched |= member.descriptors()
        if self._spares is not None:
            watched |= self._spares.descriptors()
        deadlines = [at for at in (self._ask_at, self._kill_at) if at is not None]
        seconds = min([TICK_SECONDS, *(at - time.monotonic() for at in deadlines)])
        ready = processes.wait_readable(watched, max(0.0, seconds))
        for member in self._members:
            member.pump(ready)
        if self._spares is not None:
            self._spares.look(time.monotonic(), ready)

    def _take_signals(self, now: float) -> None:
        for signum in self._inbox.take():
            action = self._stopping.on_signal(signum, now)
            if action is not None:
                self._ask_at = None
                self._kill_at = now + (self._patience(signum) if action is Action.ASK else KILL_SECONDS)
                if action is Action.ASK:
                    self._tell_of_signal(signum)
                self._signal_all(signum)

    def _patience(self, signum: int) -> float:
        return MONITOR_SECONDS + (self._spec.grace if signum == signal.SIGTERM else 0.0)

    def _tell_of_signal(self, signum: int) -> None:
        """Once, because every task would report the same. The coordinator's report of a checkpoint is still shown."""
        coordinator = ClusterShape(self._spec.servers, self._spec.workers).coordinator
        for member in self._members:
            if member.task != coordinator or signum != signal.SIGTERM:
                member.be_quiet()
        self._hide()
        say_over(f"{processes.signal_name(signum)} ends the job on all {len(self._members)} tasks")

    def _take_ends(self, now: float) -> None:
        for member in self._members:
            member.watch_again(self._deaths, now)
            if member.take_exit_code() == EXIT_BAD_INPUT and self._ports[member.task].is_taken():
                self._port_taken = True
        if self._ask_at is None and self._kill_at is None:
            self._ask_at = self._when_to_end_all(now)

    def _when_to_end_all(self, now: float) -> float | None:
        """Until when the tasks may end on their own; None while nothing is wrong."""
        if self._port_taken:
            return now
        if self._first_failure() is not None:
            return now + self._spec.end_seconds
        workers = [member for member in self._members if member.task.role is Role.WORKER]
        over = all(member.exit_code == 0 or self._goes_on_without(member) for member in workers)
        over = over and all(member.exit_code is not None for member in workers)
        return now + self._spec.finish_seconds if over else None

    def _first_failure(self) -> tuple[ClusterMember, str] | None:
        """The member whose task failed first, and how: according to its monitor, or by how the monitor ended."""
        told = {death.address: death for death in self._deaths.failures()}
        failures: list[tuple[float, str, ClusterMember]] = []
        for member in self._members:
            if self._goes_on_without(member):
                continue
            death, how = told.get(member.address), _how(member.exit_code)
            if death is not None:
                failures.append((death.at, death.how, member))
            elif how:
                failures.append((member.ended_at, how, member))
        if not failures:
            return None
        _, how, first = min(failures, key=lambda failure: failure[0])
        return first, how

    def _goes_on_without(self, member: ClusterMember) -> bool:
        role = member.task.role
        like = [other for other in self._members if other.task.role is role and other is not member]
        others = any(other.exit_code in (None, 0) for other in like)
        may_lose = self._spec.may_lose_workers if role is Role.WORKER else self._spec.may_lose_a_server
        return may_lose and others

    def _end_in_time(self, now: float) -> None:
        if self._ask_at is not None and now >= self._ask_at:
            late = [member for member in self._members if member.exit_code is None]
            if late and not self._port_taken:
                self._overdue, self._failed_before = True, self._first_failure()
                say_over(f"{', '.join(str(member.task) for member in late)} did not end in time and will be killed")
            self._signal_all(signal.SIGTERM)
            self._ask_at, self._kill_at = None, now + KILL_SECONDS
        if self._kill_at is not None and now >= self._kill_at:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, signum: int) -> None:
        for member in self._members:
            member.signal(signum)

    def _verdict(self) -> int:
        failed = self._failed_before if self._overdue else self._first_failure()
        if failed is None:
            return EXIT_FAILED if self._overdue else 0
        member, how = failed
        member.show_tail()
        say_over(f"{member.task} failed first: {how}")
        return member.exit_code if member.exit_code is not None and member.exit_code > 0 else EXIT_FAILED


def _how(exit_code: int | None) -> str:
    """How a monitor failed; empty if it did not."""
    if exit_code is None or exit_code == 0:
        return ""
    if exit_code < 0:
        return f"its monitor was killed by {processes.signal_name(-exit_code)}"
    return f"exit code {exit_code}"
