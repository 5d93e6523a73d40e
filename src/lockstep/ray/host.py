"""One task of a job, inside an actor of Ray: keeps its program running and tells everybody where it is.

A plain class; ``running.py`` makes an actor of it. Ray starts it again where it or its node was lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from lockstep.foreign import plain
from lockstep.private_files import replace_file
from lockstep.protocol.core.ids import Role
from lockstep.ray.ends import TaskEnd
from lockstep.ray.handover import ERROR, HOSTS, MOST_ERROR, RESULT, TRAIN
from lockstep.runtime import processes
from lockstep.runtime.monitor.door import ALL_VARIABLE
from lockstep.runtime.startup import tf_config
from lockstep.terminal import say
from lockstep.transports.control import host_names
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.control.ports import PortRange, ReservedPort

PORTS: Final = PortRange(20000, 29999)
"""Between the ports of Ray's own processes and those that kernels hand out."""

ASK_SECONDS: Final = 1.0
PORT_SECONDS: Final = 30.0
_OF_LAUNCHERS: Final = ("RANK", "WORLD_SIZE")
"""What a driver below torchrun would pass on; ``lockstep.join`` would believe it."""

Exchange = Callable[[str], Mapping[str, str]]
"""Tells the directory the own address; returns all names with their addresses."""


class TaskHost:
    """What the actor does."""

    def __init__(self, label: str, address: str, exchange: Exchange) -> None:
        self._label = label
        self._address = address
        self._exchange = exchange
        self._reserved: ReservedPort | None = None
        self._ended = threading.Event()
        self._node = os.getppid()

    def __repr__(self) -> str:
        """Ray writes it before every line of this task."""
        return self._label

    def place(self) -> int:
        """A port for this task, held until it is started. After a loss it stays the same on every node."""
        self._reserved = ReservedPort(self._address, PORTS)
        return self._reserved.port

    def run(self, train: bytes, config: str, restarts: int) -> TaskEnd:
        """Run the program to its end."""
        say(f"{self._label} runs on the node {self._address}")
        with tempfile.TemporaryDirectory(prefix="lockstep-ray-") as name:
            folder = Path(name)
            replace_file(folder / TRAIN, train)
            self._look_up(folder)
            asker = threading.Thread(target=self._keep_looking_up, args=(folder,), name="addresses", daemon=True)
            asker.start()
            try:
                return self._run(folder, config, restarts)
            finally:
                self._ended.set()
                asker.join(ASK_SECONDS)

    def _run(self, folder: Path, config: str, restarts: int) -> TaskEnd:
        program = (sys.executable, "-m", "lockstep.ray.program", str(folder))
        command = (sys.executable, "-m", "lockstep", "run", f"--restarts={restarts}", "--", *program)
        environment = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
        environment |= {
            tf_config.VARIABLE: config,
            ALL_VARIABLE: "1",
            host_names.VARIABLE: str(folder / HOSTS),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        if self._reserved is not None:
            self._reserved.close()
        self._wait_for_port(config)
        code = subprocess.call(processes.dies_with_this_process(command), env=environment, stdin=subprocess.DEVNULL)
        if code < 0:
            # "lockstep run" itself was killed: nobody but Ray can start this task again.
            os.kill(os.getpid(), signal.SIGKILL)
        raised = plain(_content(folder / ERROR).decode(errors="replace"), MOST_ERROR)
        return TaskEnd(code, _content(folder / RESULT), raised)

    def _wait_for_port(self, config: str) -> None:
        """A former life on this machine may still be ending. What else has the port, the program will say."""
        found = tf_config.read_tf_config({tf_config.VARIABLE: config})
        assert found is not None
        port = parse_address(found.lists()[found.task.role is Role.WORKER][found.index]).port
        deadline = time.monotonic() + PORT_SECONDS
        while not _is_free(self._address, port) and time.monotonic() < deadline:
            self._ended.wait(ASK_SECONDS / 10)

    def _keep_looking_up(self, folder: Path) -> None:
        while not self._ended.wait(ASK_SECONDS):
            if os.getppid() != self._node:
                # Ray has lost this node and starts the task elsewhere. Its own check expects process 1 as the new
                # parent, which below a subreaper it is not, and two lives of one task would be in each other's way.
                os.kill(os.getpid(), signal.SIGKILL)
            # The directory may be lost, too, and come back: the addresses so far are good until then.
            with contextlib.suppress(Exception):
                self._look_up(folder)

    def _look_up(self, folder: Path) -> None:
        replace_file(folder / HOSTS, host_names.as_hosts_file(dict(self._exchange(self._address))))


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
