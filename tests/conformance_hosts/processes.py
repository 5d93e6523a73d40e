"""The process of a remote node: on this machine, or one that a node host starts on another (``node_host.py``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from lockstep.transports.conformance.events import PATIENCE, CaseFailed

if TYPE_CHECKING:
    from conformance_hosts.forks import Forks

NODE_MODULE: Final = "conformance_hosts.node_process"
FOLDER: Final = str(Path(__file__).parents[1])
"""Where Python finds that module."""


class NodeProcess(Protocol):
    """The process of a node: two streams of lines, and what can be done to it."""

    calls: IO[str]
    answers: IO[str]

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""

    def freeze(self) -> None:
        """SIGSTOP, and wait until the kernel reports that it has stopped."""

    def resume(self) -> None:
        """SIGCONT."""

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within this many seconds."""

    def close(self) -> None:
        """Close the streams."""


class LocalProcess:
    """A child of this process."""

    def __init__(self, transport: str, task: str, incarnation: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", NODE_MODULE, transport, task, str(incarnation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.calls: IO[str] = self._process.stdin
        self.answers: IO[str] = self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise CaseFailed(f"process {self.pid} ended instead of being frozen (status {status})")

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def has_ended(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        self.answers.close()


class ForkedProcess:
    """A process of this host that was forked for us."""

    def __init__(self, forks: Forks, transport: str, task: str, incarnation: int) -> None:
        its_input, calls = os.pipe()
        answers, its_output = os.pipe()
        self._process = forks.start([transport, task, str(incarnation)], its_input, its_output)
        os.close(its_input)
        os.close(its_output)
        self.calls: IO[str] = os.fdopen(calls, "w")
        self.answers: IO[str] = os.fdopen(answers)
        self.pid = self._process.pid
        self.kill = self._process.kill
        self.freeze = self._process.freeze
        self.resume = self._process.resume
        self.has_ended = self._process.has_ended

    def close(self) -> None:
        self.answers.close()
        self._process.close()


class HostedProcess:
    """A process that a node host on another machine has started."""

    def __init__(self, address: str, transport: str, task: str, incarnation: int) -> None:
        host, _, port = address.rpartition(":")
        self._host = (host, int(port))
        self._incarnation = incarnation
        self._socket = socket.create_connection(self._host, timeout=PATIENCE)
        words = {"start": [transport, task, str(incarnation), host]}
        self._socket.sendall(json.dumps(words).encode() + b"\n")
        self._socket.settimeout(None)
        self.calls: IO[str] = self._socket.makefile("w")
        self.answers: IO[str] = self._socket.makefile("r")

    @property
    def pid(self) -> int:
        return int(self._ask("pid"))

    def kill(self) -> None:
        self._ask("kill")

    def freeze(self) -> None:
        self._ask("freeze")

    def resume(self) -> None:
        self._ask("resume")

    def has_ended(self, seconds: float) -> bool:
        with contextlib.suppress(OSError):  # its input ends with this
            self._socket.shutdown(socket.SHUT_WR)
        return bool(self._ask("wait", seconds))

    def close(self) -> None:
        for stream in (self.calls, self.answers):
            with contextlib.suppress(OSError):
                stream.close()
        self._socket.close()

    def _ask(self, what: str, seconds: float = PATIENCE) -> Any:
        with socket.create_connection(self._host, timeout=seconds + PATIENCE) as asking:
            words = {"ask": what, "incarnation": str(self._incarnation), "seconds": seconds}
            asking.sendall(json.dumps(words).encode() + b"\n")
            with asking.makefile("r") as answers:
                answer = json.loads(answers.readline() or "{}")
        if "answer" not in answer:
            raise CaseFailed(
                f"the node host at {self._host[0]} did not {what} a node: {answer.get('error', 'no answer')}"
            )
        return answer["answer"]
