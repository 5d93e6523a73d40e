"""Real processes in tests: started, watched, signalled, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from helpers.waiting import wait_until
from lockstep.runtime.processes import descendants, process_facts, send_signal

LOCKSTEP = (sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())")
"""The console command, run from the source tree."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended and what it printed. ``code`` is negative if a signal killed it."""

    code: int
    stdout: str
    stderr: str


class Program:
    """One started program. Leaving the ``with`` block kills it and everything below it.

    Its output goes to files, not pipes: no reader has to keep up, and it can be read at any time. ``terminal`` is
    a descriptor to use as stdin, stdout and stderr instead.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, terminal: int | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-test-")
        self._out = Path(self._folder.name, "stdout")
        self._err = Path(self._folder.name, "stderr")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=out if terminal is None else terminal,
                stderr=err if terminal is None else terminal,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stdout(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(errors="replace")

    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def wait(self, seconds: float) -> Finished:
        """Wait for it to end; fail with what it printed if it does not end in time."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds:g} s: {self._process.args!r}\n{self.stdout()}\n{self.stderr()}"
            ) from None
        return Finished(code, self.stdout(), self.stderr())

    def wait_for(self, text: str, seconds: float) -> str:
        """Wait until it has printed ``text`` to stdout or stderr; returns everything printed."""

        def printed() -> str:
            everything = self.stdout() + self.stderr()
            if text not in everything and not self.running():
                everything = self.stdout() + self.stderr()
                assert text in everything, f"ended with {self._process.returncode} without {text!r}: {everything}"
            return everything if text in everything else ""

        return wait_until(printed, seconds, f"output {text!r} of {self._process.args!r}")

    def close(self) -> None:
        """Kill it and what it started, if any of that still runs."""
        below = descendants(self.pid) if self._process.returncode is None else []
        for facts in below:
            send_signal(facts.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        self._folder.cleanup()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_lockstep(*arguments: str, environment: Mapping[str, str] | None = None) -> Program:
    """``lockstep ARGUMENTS``, running; use it in a ``with`` block."""
    return Program([*LOCKSTEP, *arguments], environment)


def run_lockstep(*arguments: str, timeout: float, environment: Mapping[str, str] | None = None) -> Finished:
    """``lockstep ARGUMENTS``, run to its end; fails, and kills it, if that takes longer than ``timeout`` seconds."""
    with start_lockstep(*arguments, environment=environment) as program:
        return program.wait(timeout)


def alive(pid: int) -> bool:
    """Whether this process runs (a dead one that only waits to be reaped does not)."""
    facts = process_facts(pid)
    return facts is not None and not facts.dead


def command_line(pid: int) -> list[str]:
    """The arguments of a process; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def processes_mentioning(text: str) -> list[int]:
    """Live processes that have ``text`` in their command line, except this one."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid())
    return [pid for pid in pids if any(text in argument for argument in command_line(pid)) and alive(pid)]
