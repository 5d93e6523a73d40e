"""A small task without torch, for tests of what surrounds a task. Run as a program: FD ACTION...

``FD`` is the descriptor for reports, or ``-``. Actions, done in order: ``phase=NAME``, ``ready=ADDRESS``,
``say=TEXT``, ``complain=TEXT`` (stderr), ``tty`` (say whether stdout is a terminal), ``child`` (a process in its own
session that stays), ``deaf`` (ignore SIGTERM), ``polite`` (exit 0 when asked to end), ``hang``, ``wait=FILE`` (until
the file exists), ``kill=SIGNAL`` (itself), ``exit=CODE``, ``sidecar=PORT`` (start one), ``close=CODE`` (its end),
``fork`` (a child that holds what this task has open, and stays); below ``lockstep run``: ``join=PORT`` (0: the one that
it keeps; negative: as a task of a job that does not take it back), ``over`` (the job has ended), ``left=CODE`` (it was
closed), ``back`` (the job goes back to a checkpoint, if this is the first life).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lockstep.runtime.monitor.reporter import TaskReporter

if TYPE_CHECKING:
    from lockstep.runtime.monitor.sidecar import Sidecar

INCARNATION = 0xABCDEF0123456789
JOB = 0x42


class SmallTask:
    """Carries out one action after another."""

    def __init__(self, descriptor: str) -> None:
        self._reporter = TaskReporter.none() if descriptor == "-" else TaskReporter(int(descriptor))
        self._sidecar: Sidecar | None = None
        self._later = False

    def do(self, action: str, value: str) -> None:
        match action:
            case "phase":
                self._reporter.phase(value)
            case "ready":
                self._reporter.ready(value, INCARNATION, JOB)
            case "say":
                os.write(1, f"{value}\n".encode())
            case "complain":
                os.write(2, f"{value}\n".encode())
            case "tty":
                os.write(1, b"a terminal\n" if os.isatty(1) else b"no terminal\n")
            case "child":
                subprocess.Popen([sys.executable, __file__, "-", "deaf", "hang"], start_new_session=True)
            case "fork":
                if os.fork() == 0:
                    signal.alarm(20)
                    signal.pause()
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "polite":
                signal.signal(signal.SIGTERM, _leave)
            case "hang":
                while True:
                    signal.pause()
            case "wait":
                pause = threading.Event()
                while not Path(value).exists():
                    pause.wait(0.01)
            case "kill":
                os.kill(os.getpid(), signal.Signals[value])
            case "exit":
                sys.exit(int(value))
            case "sidecar":
                from lockstep.protocol.core.ids import worker
                from lockstep.runtime.monitor.sidecar import start_sidecar  # here, so that others start quickly

                self._sidecar = start_sidecar(worker(1), "127.0.0.1", int(value), "0.0.test", 1.0)
                self._reporter = self._sidecar.reporter
            case "join":
                self._join(int(value))
            case "back":
                if not self._later:
                    self._reporter.goes_back()
            case "over":
                self._reporter.over(must_leave=False)
            case "left":
                self._reporter.ended(int(value))
            case "close_all":
                os.closerange(3, 256)
            case "close":
                assert self._sidecar is not None
                self._sidecar.close(int(value))
            case _:
                raise ValueError(f"unknown action {action!r}")

    def _join(self, port: int) -> None:
        from lockstep.runtime.monitor.door import Introduction, run_link

        link = run_link(os.environ)
        assert link is not None, "not the task"
        at = abs(port) or link.reserve(None)
        self._later = link.later
        hosts = link.met or (f"127.0.0.1:{at}", f"of life {os.getpid()}")
        link.remember(hosts)
        os.write(1, f"{hosts}\n".encode())
        link.introduce(
            Introduction(
                task="/job:worker/replica:0/task:1",
                host="127.0.0.1",
                port=at,
                version="0.0.test",
                cluster=(("/job:worker/replica:0/task:1", f"127.0.0.1:{at}"),),
                grace=1.0,
                takes_back=port >= 0,
                holds_buckets=False,
                key_file=None,
                insecure=False,
            )
        )
        self._reporter = link.reporter


def _leave(_signum: int, _frame: FrameType | None) -> None:
    os.write(1, b"leaving\n")
    sys.exit(0)


if __name__ == "__main__":
    task = SmallTask(sys.argv[1])
    for argument in sys.argv[2:]:
        task.do(*argument.partition("=")[::2])
