"""A program of one's own in which worker 1 has a fault, in its model or its loop: ``faulty_program.py --fault=NAME``.

It prints ``struck``, and the line in which it is then is marked with the fault's name.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import lockstep

STEP = 5
ROOM = 32 << 20


class Model(nn.Module):
    """One layer; in ``forward`` it does what ``fault`` says, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.fault = ""
        self.lock = threading.Lock()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fault:
            say_struck()
            self.strike(self.fault)
        return self.layer(inputs)  # type: ignore[no-any-return]

    def strike(self, fault: str) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "lock":
            with self.lock, self.lock:  # here: lock
                pass
        if fault == "exit":
            sys.exit(5)  # here: exit
        if fault == "raise":
            vars(self)["labels"]  # here: raise
        while fault == "loop":  # here: loop
            pass
        if fault == "native":
            ctypes.PyDLL(None).sleep(600)  # here: native
        if fault == "descriptors":
            os.closerange(3, 4096)
        if fault == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
            torch.ones(1 << 30)  # here: memory


def say_struck() -> None:
    sys.stdout.write("struck\n")
    sys.stdout.flush()


def main() -> None:
    ours, rest = lockstep.cluster_flags(sys.argv[1:])
    torch.set_num_threads(1)
    fault = next((word.removeprefix("--fault=") for word in rest if word.startswith("--fault=")), "")
    job = lockstep.join(startup_timeout=100, stall_after=6.0, user_code_timeout=6.0, **ours)  # type: ignore[arg-type]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.wrap(model, optimizer)
    for step in job.steps(1_000_000):
        model.fault = fault if step == STEP and job.worker == 1 else ""
        if model.fault == "skip":
            say_struck()
            continue
        if model.fault == "finish":
            say_struck()
            break
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
