"""One lab host: a virtual machine that boots in some seconds and runs what it is asked for."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from rdma.lab.image import Image

BOOT_SECONDS: Final = 180.0
PROBE_SECONDS: Final = 8.0
BOOTS: Final = 4
POLL_SECONDS: Final = 0.03
_KERNEL_LINE: Final = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"


class LabError(Exception):
    """Something of the lab itself, and not of what is tested, went wrong."""


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(POLL_SECONDS)


def accelerator(image: Image) -> str:
    """``kvm`` where it really runs this kernel, else emulation: the device may be there and not work."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    command = _emulator("kvm", image, "lab.probe=1", memory=1024)
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "tcg"
    return "kvm" if b"lab: the kernel runs" in done.stdout else "tcg"


def _emulator(accelerator: str, image: Image, words: str, memory: int) -> list[str]:
    how = "tcg,thread=multi" if accelerator == "tcg" else accelerator
    # One processor: with two, one boot in about forty panicked under emulation.
    command = (
        f"qemu-system-x86_64 -M q35 -accel {how} -cpu max -smp 1 -m {memory}M -nodefaults -no-user-config -nographic "
        f"-no-reboot -serial stdio -kernel {image.kernel} -initrd {image.initramfs}"
    )
    return [*shlex.split(command), "-append", f"{_KERNEL_LINE} {words}"]


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    output: str

    def ok(self) -> str:
        """The output of a command that must have worked."""
        if self.code != 0:
            raise LabError(f"a command ended with {self.code}:\n{self.output[-3000:]}")
        return self.output


class Job:
    """A command under way on a lab host."""

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self._name = name

    def output(self) -> str:
        path = self._machine.share / "out" / self._name
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def ended(self) -> bool:
        return (self._machine.share / "done" / self._name).exists()

    def wait(self, seconds: float) -> Done:
        try:
            until(lambda: self.ended or not self._machine.running, seconds, f"the end of {self._name}")
        except LabError as error:
            raise LabError(f"{error}\n{self.output()[-3000:]}") from None
        if not self.ended:
            raise LabError(f"{self._machine.name} went down during {self._name}:\n{self._machine.console()[-2000:]}")
        return Done(int((self._machine.share / "done" / self._name).read_text()), self.output())

    def wait_for(self, text: str, seconds: float) -> str:
        """Until its output has this text; all of the output."""
        try:
            until(lambda: text in self.output() or self.ended, seconds, f"{text!r} in the output of {self._name}")
        except LabError as error:
            raise LabError(f"{error}\n{self.output()[-3000:]}") from None
        if text not in self.output():
            raise LabError(f"{self._name} ended without saying {text!r}:\n{self.output()[-3000:]}")
        return self.output()

    def end(self) -> None:
        """Kill it and everything that it started; the tasks of a job are in sessions of their own."""
        pid = self._machine.share / "pid" / self._name
        if not self.ended and pid.exists():
            self._machine.run(f"pkill -KILL -f '[m] lockstep'; kill -KILL -- -{pid.read_text()} || true", 20)


class Machine:
    """``link`` are the emulator's words for its network."""

    def __init__(self, name: str, image: Image, folder: Path, addresses: Sequence[str], link: str) -> None:
        self.name = name
        self.boots = 0
        self.share = folder / name
        self._image = image
        self._words = f"lab.name={name} lab.addresses={','.join(addresses)}"
        self._link = link
        self._numbers = count(1)
        self._jobs: list[Job] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def console(self) -> str:
        """What the kernel and the first scripts said."""
        path = self.share / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    def power_on(self, tree: Path, accelerator: str, memory: int = 3072) -> None:
        """Begin to boot; ``tree``: an archive of what the host finds as its working folder."""
        shutil.rmtree(self.share, ignore_errors=True)
        (self.share / "todo").mkdir(parents=True)
        shutil.copy(tree, self.share / "tree.tar")
        devices = shlex.split(
            f"-drive file={self._image.disk},if=virtio,format=raw,readonly=on -device virtio-rng-pci "
            f"-virtfs local,path={self.share},mount_tag=share,security_model=none,multidevs=remap {self._link}"
        )
        command = [*_emulator(accelerator, self._image, self._words, memory), *devices]
        self.boots += 1
        with (self.share / "console").open("wb") as console:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def wait_up(self, seconds: float = BOOT_SECONDS) -> bool:
        """Whether it has come up."""
        try:
            until(lambda: self._ready() or not self.running or "Kernel panic" in self.console(), seconds, "boot")
        except LabError:
            return False
        return self._ready()

    def _ready(self) -> bool:
        return (self.share / "ready").exists()

    def start(self, command: str) -> Job:
        """Run a command there, and do not wait for it."""
        number = next(self._numbers)
        name = f"{number:03d}"
        part = self.share / "todo" / f"{name}.part"
        part.write_text(json.dumps({"command": command}))
        part.rename(self.share / "todo" / name)
        job = Job(self, name)
        self._jobs.append(job)
        return job

    def run(self, command: str, seconds: float) -> Done:
        return self.start(command).wait(seconds)

    def end_all(self) -> None:
        """Kill every command that still runs."""
        for job in self._jobs:
            if not job.ended:
                job.end()
        self._jobs.clear()

    def power_off(self) -> None:
        if self._process is None:
            return
        if self.running:
            (self.share / "stop").write_text("")
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._process = None
