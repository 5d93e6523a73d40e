"""One lab host: a virtual machine that boots in some seconds and runs what it is asked for.

Nothing of it lies in the file system but a log, and it ends with the process that started it, however that one ends:
its cable, its channel and its second disk are open descriptors, and the kernel kills it when its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from rdma.lab.image import Image

BOOT_SECONDS: Final = 120.0
PROBE_ALL_SECONDS: Final = 8.0
BOOTS: Final = 4
OFF_SECONDS: Final = 5.0
MEMORY: Final = 3072
"""Megabytes."""
_KERNEL_LINE: Final = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr init_on_alloc=0 transparent_hugepage=always audit=0 "
    "nowatchdog"
)
_STARTED_BY_US: Final = ("sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"')
"""Followed by our number: whoever was killed before the kernel was told to kill its child with it has no child."""


class LabError(Exception):
    """Something of the lab itself, and not of what is tested, went wrong."""


def accelerator(image: Image) -> str:
    """``kvm`` where it really runs this kernel, else emulation: the device may be there and not work."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    command = _emulator("kvm", image, "lab.probe=1", memory=1024)
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_ALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "tcg"
    return "kvm" if b"lab: the kernel runs" in done.stdout else "tcg"


def _emulator(accelerator: str, image: Image, words: str, memory: int) -> list[str]:
    how = "tcg,thread=multi" if accelerator == "tcg" else accelerator
    # One processor: with two, one boot in about forty panicked under emulation. An emulated `rep movsb`, which erms
    # recommends, goes byte by byte.
    command = (
        f"qemu-system-x86_64 -M q35 -accel {how} -cpu max,la57=off,erms=off -smp 1 -m {memory}M -nodefaults "
        f"-no-user-config -nographic -no-reboot -serial stdio -kernel {image.kernel} -initrd {image.initramfs}"
    )
    dies_with_us = ["setpriv", "--pdeathsig", "KILL", "--", *_STARTED_BY_US, str(os.getpid())]
    return [*dies_with_us, *shlex.split(command), "-append", f"{_KERNEL_LINE} {words}"]


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, what it said, and when it began and ended."""

    code: int
    output: str
    began: float
    ended: float

    def ok(self) -> Done:
        """A command that must have worked."""
        if self.code != 0:
            raise LabError(f"a command ended with {self.code}:\n{self.output[-3000:]}")
        return self


class Job:
    """A command under way on a lab host. What it says comes on the machine's thread, which wakes those who wait.

    Times are those of the lab host, which tells them, in the seconds of this machine's clock.
    """

    def __init__(self, machine: Machine, name: str, command: str, *, lasting: bool) -> None:
        self.name = name
        self.pid = 0
        self.lasting = lasting
        self._machine = machine
        self._command = command
        self._texts: list[tuple[float, str]] = []
        self._began = 0.0
        self._done: Done | None = None

    def __str__(self) -> str:
        return f"'{self._command[-60:]}' on {self._machine.name}"

    def heard(self, words: dict[str, Any], ahead: float) -> None:
        """On the machine's thread, under its condition. ``ahead``: what this machine's clock is ahead of the host's."""
        if "began" in words:
            self._began = words["at"] + ahead
        elif "pid" in words:
            self.pid = words["pid"]
        elif "text" in words:
            self._texts.append((words["at"] + ahead, words["text"]))
        elif "code" in words:
            self._done = Done(words["code"], self.output(), self._began, words["ended"] + ahead)

    def output(self) -> str:
        return "".join(text for _, text in list(self._texts))

    @property
    def ended(self) -> bool:
        return self._done is not None

    def wait(self, seconds: float) -> Done:
        self._machine.wait_until(lambda: self.ended, seconds, f"the end of {self}", self.output)
        assert self._done is not None
        return self._done

    def wait_for(self, pattern: str, seconds: float) -> float:
        """Until its output matches; when that was."""
        what = f"{pattern!r} in the output of {self}"
        self._machine.wait_until(lambda: self.ended or self.when(pattern) is not None, seconds, what, self.output)
        when = self.when(pattern)
        if when is None:
            raise LabError(f"{self} ended without saying {pattern!r}:\n{self.output()[-3000:]}")
        return when

    def when(self, pattern: str) -> float | None:
        """When its output matched first."""
        found = re.search(pattern, self.output())
        if found is None:
            return None
        length = 0
        for at, text in self._texts:
            length += len(text)
            if length >= found.end():
                return at
        raise AssertionError("what was found is in the output")

    def end(self) -> None:
        """Kill it and everything that it started."""
        self._machine.wait_until(lambda: self.ended or self.pid > 0, 20, f"the start of {self}")
        if not self.ended:
            self._machine.tell({"end": self.name, "pid": self.pid})
            self.wait(20)


class Machine:
    """``log``: the file for what it says while it boots; beside it lies another one with all that it says later."""

    def __init__(self, name: str, image: Image, address: str, log: Path) -> None:
        self.name = name
        self.boots = 0
        self._image = image
        self._log = log
        self._words = f"lab.name={name} lab.address={address}/24"
        self._numbers = count(1)
        self._jobs: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._ready = False
        self._gone = True
        self._ahead = math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._reader: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return not self._gone

    @property
    def pid(self) -> int:
        """Of its emulator; 0 while it is off."""
        return 0 if self._process is None else self._process.pid

    def console(self) -> str:
        """What the kernel and the first scripts said."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def power_on(self, tree: int, network: Sequence[str], cables: Sequence[int], how: str) -> None:
        """Begin to boot. ``tree``: descriptor of an archive of what the host finds as its working folder; ``network``
        and ``cables``: the emulator's words for its network, and the descriptors of the cables that it holds."""
        self._channel, far = socket.socketpair()
        devices = shlex.split(
            f"-drive file={self._image.disk},if=virtio,format=raw,readonly=on -device virtio-rng-pci "
            f"-drive file=/dev/fd/{tree},if=virtio,format=raw,readonly=on "
            f"-chardev socket,id=lab,fd={far.fileno()} -device virtio-serial-pci "
            "-device virtserialport,chardev=lab,name=lab"
        )
        command = [*_emulator(how, self._image, self._words, MEMORY), *devices, *network]
        self.boots += 1
        self._ready, self._gone, self._ahead = False, False, math.inf
        with far, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(tree, *cables, far.fileno())
            )
        # A daemon: this process must be able to end, however it does, for the emulator to end with it.
        self._reader = threading.Thread(
            target=self._listen, args=(self._channel,), name=f"lab-{self.name}", daemon=True
        )
        self._reader.start()

    def _listen(self, channel: socket.socket) -> None:
        """What the host says, until it is off: half a line, or an error of the socket, is how a killed one ends."""
        log = self._log.with_suffix(".log")
        with channel.makefile("rb") as lines, log.open("wb", buffering=0) as record, contextlib.suppress(OSError):
            for line in lines:
                record.write(line)
                if line.endswith(b"\n"):
                    self._hear(json.loads(line))
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _hear(self, words: dict[str, Any]) -> None:
        # The word that took the least time to come here tells best how the clocks differ.
        self._ahead = min(self._ahead, time.monotonic() - words["at"])
        with self._changed:
            if "ready" in words:
                self._ready = True
            elif words["job"] in self._jobs:
                self._jobs[words["job"]].heard(words, self._ahead)
            self._changed.notify_all()

    def wait_until(
        self, condition: Callable[[], bool], seconds: float, what: str, output: Callable[[], str] = str
    ) -> None:
        """Wait for something that the host tells of; LabError where it does not in time, or goes down."""
        with self._changed:
            heard = self._changed.wait_for(lambda: condition() or self._gone, seconds)
            if condition():
                return
        if not heard:
            raise LabError(f"waited {seconds:g} s in vain for {what}\n{output()[-3000:]}")
        raise LabError(f"{self.name} went down before {what}:\n{self.console()[-2000:]}")

    def wait_up(self) -> bool:
        """Whether it has come up."""
        try:
            self.wait_until(lambda: self._ready, BOOT_SECONDS, "its boot")
        except LabError:
            return False
        return True

    def start(self, command: str, *, lasting: bool = False) -> Job:
        """Run a command there, and do not wait for it. ``lasting``: it may go on beyond the test that starts it."""
        name = str(next(self._numbers))
        job = Job(self, name, command, lasting=lasting)
        with self._changed:
            self._jobs[name] = job
        self.tell({"job": name, "command": command})
        return job

    def tell(self, words: dict[str, object]) -> None:
        assert self._channel is not None
        self._channel.sendall(json.dumps(words).encode() + b"\n")

    def run(self, command: str, seconds: float) -> Done:
        return self.start(command).wait(seconds)

    def end_all(self) -> None:
        """Kill every command that still runs, and forget those that have ended."""
        for job in list(self._jobs.values()):
            if not job.lasting:
                job.end()
                del self._jobs[job.name]

    def power_off(self) -> None:
        if self._process is None or self._channel is None or self._reader is None:
            return
        try:
            if self.running:
                self.tell({"off": True})
            self._process.wait(OFF_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10.0)
        self._reader.join(10.0)
        self._channel.close()
        self._process = None
