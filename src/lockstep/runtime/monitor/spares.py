"""Spares: processes that have loaded what every task needs, and take the place of one that was lost.

``SparePool`` keeps so many of them (``spare.py`` is what they run): in the monitor of one task, or in the launcher of a
cluster on this machine, which lends them to its monitors (``LentSpares``). A spare is started like a task, so it dies
with whoever keeps it, whatever kills that one. If none is ready, a lost task is started as always.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.foreign import JsonError, read_json
from lockstep.protocol.core.timing import REAPER_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.monitor.door import RunDoor
from lockstep.runtime.monitor.python_command import PythonCommand
from lockstep.runtime.monitor.spare import GO, READY
from lockstep.runtime.monitor.task_process import TaskProcess, words_of
from lockstep.terminal import say

SPARES_VARIABLE: Final = "LOCKSTEP_SPARES"
"""In a monitor's environment: the descriptor over which its launcher lends spares."""
AGAIN_SECONDS: Final = 1.0
"""How long after a spare has taken a place the next one begins to load: the job comes first."""
MOST_FAILURES: Final = 2
LENT_SECONDS: Final = 1.0
"""How long a monitor waits for its launcher's answer before it starts the task itself."""
ASK: Final = b"t"
_MAX_BYTES: Final = 4096
_LENT: Final = 5
"""Commands, status, reports, the reaper, the socket to the spare."""

_CODE: Final = "import sys; sys.path.append(sys.argv[1]); from lockstep.runtime.monitor.spare import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparePlan:
    """What the spares of a job are."""

    count: int
    program: PythonCommand
    """What they will run, but for its arguments."""
    loads: str
    """``module:function``, called with ``words``: loads whatever can be loaded before the place is known."""
    words: tuple[str, ...] = ()
    any_program: bool = False
    """It is the user's, below ``lockstep run``."""


class Spare:
    """One of them, from its start on."""

    def __init__(self, plan: SparePlan) -> None:
        self.control, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.door = RunDoor() if plan.any_program else None
        self.ready = False
        told = {"program": plan.program.words, "loads": plan.loads, "words": plan.words}
        root = str(Path(__file__).resolve().parents[3])
        interpreter = (plan.program.python, *plan.program.flags)
        with guest:
            self.process = TaskProcess(
                (*interpreter, "-c", _CODE, root, str(guest.fileno()), json.dumps(told)),
                takes_signals=not plan.any_program,
                door=self.door,
                passed=(guest.fileno(),),
            )

    def descriptors(self) -> set[int]:
        return {self.process.status_fd} if self.ready else {self.process.status_fd, self.control.fileno()}

    def look(self, ready: set[int]) -> None:
        """Take in what it says; ``process.news`` has its end."""
        if self.process.status_fd in ready:
            self.process.read_status()
        if not self.ready and self.control.fileno() in ready:
            with contextlib.suppress(OSError):
                self.ready = self.control.recv(16) == READY

    @property
    def ended(self) -> bool:
        return self.process.news.exit_code is not None

    def close(self) -> None:
        """End it; returns when nothing of it is left."""
        self.control.close()
        if self.door is not None:
            self.door.close()
        self.process.close(REAPER_SECONDS)


def send_off(
    control: socket.socket, words: Sequence[str], environ: Mapping[str, str] | None, watched_name: str = ""
) -> bool:
    """Let the spare at ``control`` become this program, with the streams of this process; False if it is gone.

    ``environ``: if it differs from what the spare was started with. ``watched_name``: how to call the program in a
    sentence about variables that it sets too late.
    """
    facts = {"words": words, "environ": None if environ is None else dict(environ), "cwd": os.getcwd()}
    description = json.dumps({**facts, "monitor": os.getpid(), "watches": watched_name}).encode()
    # A file, because an environment may be longer than a packet.
    file = os.memfd_create("lockstep-spare")
    try:
        os.write(file, description)
        os.lseek(file, 0, os.SEEK_SET)
        socket.send_fds(control, [GO], [1, 2, file])
    except OSError:
        return False
    finally:
        os.close(file)
    return True


@dataclass(frozen=True, slots=True)
class Placed:
    """A spare that is a task now."""

    process: TaskProcess
    door: RunDoor | None = None


class Spares:
    """What a monitor asks for spares; this one has none."""

    def descriptors(self) -> set[int]:
        """What to wait for, for ``look``."""
        return set()

    def look(self, now: float, ready: set[int]) -> None:
        """Call it often, with the descriptors that have something to read."""

    def place(self, command: Sequence[str]) -> Placed | None:  # noqa: ARG002 - has none
        """Let a spare become this incarnation of the task; None if no spare is ready."""
        return None

    def reapers(self) -> frozenset[int]:
        """Children of this process that belong to spares."""
        return frozenset()

    def close(self) -> None:
        """No spare is needed any more. May be called twice."""


class SparePool(Spares):
    """So many spares, started by this process: on its main thread, and as a subreaper."""

    def __init__(self, plan: SparePlan, tell: Callable[[str], None] = say) -> None:
        self._plan = plan
        self._tell = tell
        self._spares: list[Spare] = []
        self.lent: list[TaskProcess] = []
        """Whose reapers are children of this process, though another one has adopted them."""
        self._told = False
        self._failures = 0
        self._start_at: float | None = 0.0
        """None: no more are started."""

    def descriptors(self) -> set[int]:
        return {descriptor for spare in self._spares for descriptor in spare.descriptors()}

    def reapers(self) -> frozenset[int]:
        return frozenset(spare.process.reaper_pid for spare in self._spares)

    def look(self, now: float, ready: set[int]) -> None:
        for spare in list(self._spares):
            spare.look(ready)
            if spare.ended:
                self._on_end(spare, now)
        self.lent = [process for process in self.lent if not process.reaped()]
        if self._start_at is not None and now >= self._start_at:
            while len(self._spares) < self._plan.count:
                self._spares.append(Spare(self._plan))
        waiting = sum(spare.ready for spare in self._spares)
        if waiting == self._plan.count and not self._told:
            self._told = True
            self._tell("1 spare waits for a task to be lost" if waiting == 1 else _several(waiting))

    def _on_end(self, spare: Spare, now: float) -> None:
        """Something killed it, or it could not load."""
        code = spare.process.news.exit_code
        self._failures = 0 if spare.ready else self._failures + 1
        self._remove(spare)
        spare.close()
        self._start_at = now + AGAIN_SECONDS
        if self._failures >= MOST_FAILURES:
            self._start_at = None
            self._tell(f"no spare could be started (exit code {code}); a lost task is started as always")

    def take(self) -> Spare | None:
        """One that is ready, which is the caller's from now on; another one is started in its place."""
        self.look(time.monotonic(), processes.wait_readable(self.descriptors(), 0.0))
        for spare in self._spares:
            if spare.ready:
                self._remove(spare)
                if self._start_at is not None:
                    self._start_at = time.monotonic() + AGAIN_SECONDS
                return spare
        return None

    def place(self, command: Sequence[str]) -> Placed | None:
        while (spare := self.take()) is not None:
            words = words_of(command, spare.process.report_number)
            name = self._plan.program.file or self._plan.program.module
            if send_off(spare.control, words, None, name if self._plan.any_program else ""):
                spare.control.close()
                return Placed(spare.process, spare.door)
            spare.close()
        return None

    def _remove(self, spare: Spare) -> None:
        self._spares.remove(spare)

    def close(self) -> None:
        self._start_at = None
        for spare in self._spares:
            spare.close()
        self._spares.clear()


def _several(count: int) -> str:
    return f"{count} spares wait for tasks to be lost"


class SpareDesk:
    """The launcher's end: lends spares of its pool to one monitor."""

    def __init__(self, pool: SparePool) -> None:
        self._pool = pool
        self._host, self.guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._host.setblocking(False)
        self._open = True

    def environ(self) -> dict[str, str]:
        """The environment of the monitor, which also inherits ``guest``."""
        found = os.fstat(self.guest.fileno())
        return {**os.environ, SPARES_VARIABLE: f"{self.guest.fileno()}:{found.st_dev}:{found.st_ino}"}

    def descriptors(self) -> set[int]:
        return {self._host.fileno()} if self._open else set()

    def look(self, ready: set[int]) -> None:
        """Answer the monitor if it asks."""
        if not self._open or self._host.fileno() not in ready:
            return
        try:
            asked = self._host.recv(16)
        except BlockingIOError:
            return
        except OSError:
            asked = b""
        if asked != ASK:
            self._open = False
            return
        self._lend(self._pool.take())

    def _lend(self, spare: Spare | None) -> None:
        if spare is None:
            with contextlib.suppress(OSError):
                self._host.send(b"{}")
            return
        facts = {"pid": spare.process.news.pid, "report": spare.process.report_number}
        try:
            socket.send_fds(self._host, [json.dumps(facts).encode()], [*spare.process.lent(), spare.control.fileno()])
        except OSError:
            spare.close()
            return
        spare.process.let_go()
        spare.control.close()
        self._pool.lent.append(spare.process)

    def close(self) -> None:
        self._open = False
        self._host.close()
        self.guest.close()


class LentSpares(Spares):
    """The monitor's end of a ``SpareDesk``."""

    def __init__(self, desk: socket.socket) -> None:
        self._desk: socket.socket | None = desk

    def place(self, command: Sequence[str]) -> Placed | None:
        found = self._ask()
        if found is None:
            return None
        process, control = found
        with control:
            if send_off(control, words_of(command, process.report_number), os.environ):
                return Placed(process)
        process.close(REAPER_SECONDS)
        return None

    def _ask(self) -> tuple[TaskProcess, socket.socket] | None:
        if self._desk is None:
            return None
        descriptors: list[int] = []
        try:
            self._desk.settimeout(LENT_SECONDS)
            self._desk.send(ASK)
            said, descriptors, _, _ = socket.recv_fds(self._desk, _MAX_BYTES, _LENT)
            facts = read_json(said, _MAX_BYTES)
            if len(descriptors) == _LENT:
                *ends, control = descriptors
                process = TaskProcess.adopted(*ends, pid=int(facts["pid"]), report_number=int(facts["report"]))
                return process, socket.socket(fileno=control)
        except (OSError, JsonError, KeyError, TypeError, ValueError):
            self.close()  # an answer that comes later would be taken for the next one
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def close(self) -> None:
        if self._desk is not None:
            self._desk.close()
        self._desk = None


def lent_spares(environ: dict[str, str] | os._Environ[str]) -> Spares | None:
    """The spares of the launcher that has started this monitor; None if it lends none. Tasks do not see them."""
    words = environ.pop(SPARES_VARIABLE, "").split(":")
    try:
        descriptor, device, number = map(int, words)
        found = os.fstat(descriptor)
    except (ValueError, OSError):
        return None
    if (found.st_dev, found.st_ino) != (device, number):
        return None
    os.set_inheritable(descriptor, False)
    return LentSpares(socket.socket(fileno=descriptor))
