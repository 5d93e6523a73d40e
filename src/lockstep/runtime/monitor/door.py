"""Between ``lockstep run`` and the program below it: who the program is, asked and answered over a pair of sockets.

``lockstep run`` starts any program and learns only from ``lockstep.join`` which task that is and where it is to answer
for it. What one life has settled with the others, the next life gets back: its port, and where every task is. So a
launcher's ranks meet once, and the address of a lost one stays what the others know.

The descriptors are in a variable, with the numbers that the kernel gives to what they refer to: a program that
something else starts below inherits the variable, but has other things open under these numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from lockstep.errors import BadInput
from lockstep.foreign import JsonError, read_json
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.transports.control.ports import PortRange

RUN_VARIABLE: Final = "LOCKSTEP_RUN"
ALL_VARIABLE: Final = "LOCKSTEP_RUN_HAS_ALL"
"""Set by an engine that starts every task of a job, its servers too, below ``lockstep run``."""
MAX_BYTES: Final = 1 << 20
ANSWER_SECONDS: Final = 30.0
"""``lockstep run`` answers at once; on a machine that is starting a hundred tasks it takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Which task a program is, where its monitor is to answer for it, and what its loss means."""

    task: str
    host: str
    port: int
    version: str
    cluster: tuple[tuple[str, str], ...]
    grace: float
    takes_back: bool
    """Whether the job goes on after the loss of this task."""
    holds_buckets: bool
    """The others need it until the end of the job, even if it has made all its steps."""
    key_file: str | None
    """None: the default one."""
    insecure: bool
    metrics_port: str = ""
    metrics_file: str = ""


class RunDoor:
    """The pair of sockets of one life. ``host`` stays with ``lockstep run``, ``guest`` goes to the program."""

    def __init__(self) -> None:
        # One message per packet, so none has to be put together.
        self.host, self.guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.host.setblocking(False)
        for end in (self.host, self.guest):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)

    def described(self, report_fd: int) -> str:
        """The variable's value for the program."""
        descriptors = (report_fd, self.guest.fileno())
        return " ".join(f"{fd}:{os.fstat(fd).st_dev}:{os.fstat(fd).st_ino}" for fd in descriptors)

    def take(self) -> dict[str, Any] | None:
        """The program's question, if it has one; an empty one if it is gone."""
        try:
            packet = self.host.recv(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        with contextlib.suppress(JsonError):
            said = read_json(packet, MAX_BYTES) if packet else None
            if isinstance(said, dict):
                return said
        return {}

    def answer(self, **facts: object) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self.host.send(json.dumps(facts).encode())

    def close(self) -> None:
        self.host.close()
        self.guest.close()


class RunLink:
    """The program's end: asks ``lockstep run``, and reports to it like a task to its monitor."""

    def __init__(self, door: socket.socket, reporter: TaskReporter) -> None:
        self._door = door
        self.reporter = reporter
        self.met: tuple[str, ...] = ()
        """Where every rank of a launcher listens, if a former life has found out."""
        self.later = False
        """There was a former life."""
        self.finished = False
        """It had made all its steps."""
        self.former_job = 0
        """The job that it was in."""
        self.restarts = 0
        """How often ``lockstep run`` starts a lost program again."""

    def greet(self) -> bool:
        """False: another process of this program is already the task."""
        said = self._ask(hello=True)
        if said.get("taken"):
            self._door.close()
            return False
        self.met = tuple(str(host) for host in said.get("hosts", ()))
        self.later, self.finished = bool(said.get("later")), bool(said.get("finished"))
        self.restarts, self.former_job = int(said.get("restarts", 0)), int(said.get("job", 0))
        return True

    def reserve(self, ports: PortRange | None) -> int:
        """The port for this task, the same in all its lives."""
        among = None if ports is None else [ports.first, ports.last, sorted(ports.promised)]
        return int(self._ask(reserve=among)["port"])

    def remember(self, hosts: tuple[str, ...]) -> None:
        """Leave to later lives where every rank is."""
        self._ask(hosts=list(hosts))

    def be_patient(self, seconds: float) -> None:
        """The end that a signal asks for may take this long."""
        self._ask(patience=seconds)

    def introduce(self, introduction: Introduction) -> None:
        """From now on ``lockstep run`` answers for this task. BadInput if it cannot."""
        self._ask(introduction=asdict(introduction))

    def close(self, exit_code: int = 0) -> None:
        """The job has ended for this task, or for this life of it. May be called twice."""
        if not self.reporter.report.goes_back:
            self.reporter.ended(exit_code)
        self.reporter.close()
        self._door.close()

    def leave(self) -> None:
        """This program is a monitor, and answers for its task itself."""
        self.reporter.close()
        self._door.close()

    def _ask(self, **question: object) -> dict[str, Any]:
        try:
            self._door.settimeout(ANSWER_SECONDS)
            self._door.send(json.dumps(question).encode())
            said = read_json(self._door.recv(MAX_BYTES), MAX_BYTES)
        except TimeoutError:
            raise BadInput(
                f"'lockstep run' did not answer within {ANSWER_SECONDS:g} s; is it stopped, or the machine overloaded?"
            ) from None
        except (OSError, JsonError):
            raise BadInput("'lockstep run', which started this program, does not answer; start it again.") from None
        if not isinstance(said, dict) or said.get("problem"):
            raise BadInput(str(said.get("problem") if isinstance(said, dict) else said))
        return said


def run_link(environ: Mapping[str, str]) -> RunLink | None:
    """The way to the ``lockstep run`` that started this very process; None if nobody has, or it is used already."""
    try:
        (report, *what), (door, *whom) = (map(int, word.split(":")) for word in environ.get(RUN_VARIABLE, "").split())
    except ValueError:
        return None
    if not (_is_open(report, what) and _is_open(door, whom)):
        return None
    for descriptor in (report, door):
        os.set_inheritable(descriptor, False)
    link = RunLink(socket.socket(fileno=os.dup(door)), TaskReporter(os.dup(report)))
    if link.greet():
        return link
    link.reporter.close()
    return None


def _is_open(descriptor: int, what: list[int]) -> bool:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return [found.st_dev, found.st_ino] == what
