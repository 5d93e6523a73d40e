"""Programs that start at once: they are forked from a process that has imported torch already.

To whatever they do this makes no difference: the parent has no thread, and has imported nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from helpers.programs import alive
from helpers.waiting import wait_until
from lockstep.runtime.processes import descendants, send_signal


class WarmProgram:
    """One forked program, as ``helpers.programs.Program``: its output goes to files."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder

    def said(self) -> str:
        """All that it has printed so far."""
        return self._read("stdout") + self._read("stderr")

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")

    def code(self) -> int | None:
        """How it ended, negative if a signal killed it; None while it runs."""
        text = self._read("code")
        return int(text) if text else None

    def wait_for(self, text: str, seconds: float) -> str:
        """Wait until it has printed ``text``; returns all that it has."""

        def printed() -> str:
            said = self.said()
            return said if text in said else ""

        try:
            return wait_until(printed, seconds, f"output {text!r}")
        except AssertionError as late:
            raise AssertionError(f"{late}; it printed: {self.said()}") from None

    def wait(self, seconds: float) -> int:
        wait_until(lambda: self.code() is not None, seconds, f"the end of {self.pid}, which printed: {self.said()}")
        code = self.code()
        assert code is not None
        return code

    def close(self) -> None:
        """Kill it and what it started, if any of that still runs."""
        for facts in descendants(self.pid):
            send_signal(facts.pid, signal.SIGKILL)
        if self.code() is None:
            send_signal(self.pid, signal.SIGKILL)
            self.wait(10)


class WarmStart:
    """The process that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from helpers.warm_programs import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )

    @contextmanager
    def start(self, program: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[WarmProgram]:
        """``program``: the path of a script, or the name of a module, and its arguments."""
        self._started += 1
        folder = self._folder / str(self._started)
        folder.mkdir()
        for name in ("stdout", "stderr", "code"):
            (folder / name).touch()
        order = json.dumps({"argv": list(program), "folder": str(folder), "environment": dict(environment or {})})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        started = WarmProgram(int(self._process.stdout.readline()), folder)
        try:
            yield started
        finally:
            started.close()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=10)
        assert not alive(self._process.pid)


@contextmanager
def warm_start() -> Iterator[WarmStart]:
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
        started = WarmStart(Path(folder))
        try:
            yield started
        finally:
            started.close()


def serve() -> None:
    """Fork one program for each line that comes."""
    import torch.utils.data  # noqa: F401 - what takes long

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        order = json.loads(line)
        # One process between, which waits for the program, so that this one never has to.
        if not os.fork():
            _watch(order)
            os._exit(0)
        os.wait()


def _watch(order: dict[str, object]) -> None:
    if os.fork():
        return
    child = os.fork()
    if not child:
        _run(order)
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
    _, status = os.waitpid(child, 0)
    Path(str(order["folder"]), "code").write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _run(order: dict[str, object]) -> None:
    os.setsid()
    folder = Path(str(order["folder"]))
    for number, target in enumerate((Path(os.devnull), folder / "stdout", folder / "stderr")):
        opened = os.open(target, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    environment, argv = order["environment"], order["argv"]
    assert isinstance(environment, dict)
    assert isinstance(argv, list)
    os.environ.update(environment)
    sys.argv = argv
    program = runpy.run_path if argv[0].endswith(".py") else runpy.run_module
    program(argv[0], run_name="__main__")
    sys.exit()
