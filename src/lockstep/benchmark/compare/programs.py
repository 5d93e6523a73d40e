"""The programs of one run: started together, limited in time, and always ended. Torch-free, Linux only."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from lockstep.runtime import processes

ASK_SECONDS = 12.0
"""A cluster that is asked to end gives its tasks a few seconds."""
KILL_SECONDS = 5.0
TAIL_LINES = 4


class RunFailedError(Exception):
    """A run produced no number; the text includes its program's last output."""


class Program:
    """One program, with its output in files or its stdout as lines."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], folder: Path, talks: bool
    ) -> None:
        """``talks``: exchange lines over stdin and stdout; otherwise its stdout goes to a file."""
        self.name = name
        self.output = folder / f"{name}.out"
        self.errors = folder / f"{name}.err"
        self._rest = b""
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                processes.dies_with_this_process(command),
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else output,
                stderr=errors,
                env=dict(environ),
                bufsize=0,
                # Ctrl-C in the terminal reaches only the comparison, which ends its programs in order.
                process_group=0,
            )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            raise self.failure() from None

    def hear(self, word: str, deadline: float) -> str:
        """The rest of its next line, which must begin with ``word``; RunFailedError if it ends or takes too long."""
        return hear_all([self], word, deadline)[0]

    def next_line(self) -> str | None:
        """A line that has already arrived."""
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        return line.decode(errors="replace")

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read_more(self) -> None:
        """Read what it wrote; RunFailedError at the end of its output."""
        assert self.process.stdout is not None
        data = self.process.stdout.read(65536)
        if not data:
            raise self.failure()
        self._rest += data

    def wait(self, deadline: float) -> None:
        """Wait until it has succeeded; RunFailedError if it failed or takes too long."""
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RunFailedError(
                f"{self.name} did not end in time; give a longer --run_timeout or fewer steps"
            ) from None
        if code:
            raise self.failure()

    def failure(self) -> RunFailedError:
        """Its last output, and how it ended."""
        try:
            code = self.process.wait(ASK_SECONDS)
        except subprocess.TimeoutExpired:
            return RunFailedError(f"{self.name} closed its output but is still running")
        how = f"exit code {code}" if code >= 0 else processes.signal_name(-code)
        return RunFailedError(f"{self.name} ended with {how}: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line.strip() for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-TAIL_LINES:]) or "it printed nothing"

    def signal(self, signum: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def hear_all(programs: Sequence[Program], word: str, deadline: float) -> list[str]:
    """The next line of each, without the ``word`` that it must begin with. The first that fails ends the wait."""
    heard: dict[str, str] = {}
    while True:
        for program in programs:
            if program.name not in heard and (line := program.next_line()) is not None:
                if not line.startswith(word):
                    raise RunFailedError(f"{program.name} printed {line!r} instead of {word!r}")
                heard[program.name] = line.removeprefix(word).strip()
        waiting = {program.fileno(): program for program in programs if program.name not in heard}
        if not waiting:
            return [heard[program.name] for program in programs]
        ready = processes.wait_readable(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(program.name for program in waiting.values())
            raise RunFailedError(f"{names} did not answer in time; give a longer --run_timeout or fewer steps")
        for descriptor in ready:
            waiting[descriptor].read_more()


class Programs:
    """The programs of one run. After the block, none of them is running."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._environ = environ
        self._started: list[Program] = []

    def start(self, name: str, command: Sequence[str], talks: bool, **more: str) -> Program:
        """``more``: variables for its environment."""
        program = Program(name, command, {**self._environ, **more}, self.folder, talks)
        self._started.append(program)
        return program

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, patience in ((signal.SIGTERM, ASK_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for program in self._started:
                program.signal(signum)
            deadline = time.monotonic() + patience
            if all(_has_ended(program, deadline) for program in self._started):
                break
        for program in self._started:
            program.close()


def _has_ended(program: Program, deadline: float) -> bool:
    try:
        program.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True
