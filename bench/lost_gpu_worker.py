"""Kills a worker whose model is compiled and on a GPU, and says where the time goes until the job moves on.

    python bench/lost_gpu_worker.py --kills=2

One server and two workers on this host, the workers below ``lockstep run`` and on one GPU. Each kill is a SIGKILL of
worker 1 in the middle of a step. Prints the seconds from the kill to the next step that all make, and of those the
parts that the new process names: Python and torch, the GPU's context, joining, the state, compiling.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.transports.control.ports import ReservedPort

STEPS_BEFORE = 15
SECONDS = 150.0
PART = re.compile(r"^part (\w+) (\S+)$", re.MULTILINE)


# -- the program --


def program(words: list[str]) -> None:
    import torch
    from torch import nn

    import lockstep

    ours, _ = lockstep.cluster_flags(words)
    tell("imported")
    torch.zeros(1, device="cuda").item()
    tell("context")
    with lockstep.join(**ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        tell("joined")
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        job.wrap(model, optimizer)
        tell("state")
        compiled = torch.compile(model)
        for step in job.steps(10**6, seed=7):
            optimizer.zero_grad()
            compiled(torch.randn(64, 512, device="cuda")).square().mean().backward()
            torch.cuda.synchronize()
            tell("compiled")
            optimizer.step()
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
            time.sleep(0.05)


_told: set[str] = set()


def tell(part: str) -> None:
    """Once: this part of a process's start is over."""
    if part not in _told:
        _told.add(part)
        sys.stdout.write(f"pid {os.getpid()}\npart {part} {time.time():.3f}\n")
        sys.stdout.flush()


# -- the job around it --


class GpuJob:
    """One server and two workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        self.ports = contextlib.ExitStack()

    def start(self) -> None:
        first, *others = (self.ports.enter_context(ReservedPort()).address for _ in range(3))
        lists = (f"--ps_hosts={first}", f"--worker_hosts={','.join(others)}")
        ours = [sys.executable, "-m", "lockstep"]
        self._start("server", [*ours, "ps", *lists, "--task_index=0"])
        for index in range(2):
            words = ("--as_program", *lists, "--job_name=worker", f"--task_index={index}")
            self._start(f"worker-{index}", [*ours, "run", "--restarts=9", "--", sys.executable, __file__, *words])

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def said(self, worker: int) -> str:
        return (self.folder / f"worker-{worker}.log").read_text(errors="replace")

    def steps(self, worker: int) -> int:
        return len(re.findall(r"^step \d+$", self.said(worker), re.MULTILINE))

    def wait_for_steps(self, worker: int, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.steps(worker) < count:
            if time.monotonic() > deadline or any(one.poll() is not None for one in self.started):
                raise SystemExit(f"worker {worker} made no {count} steps: see {self.folder}")
            time.sleep(0.01)

    def kill(self, worker: int) -> float:
        pid = int(re.findall(r"^pid (\d+)$", self.said(worker), re.MULTILINE)[-1])
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def close(self) -> None:
        for one in self.started:
            one.send_signal(signal.SIGTERM)
        for one in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(15)
            if one.poll() is None:
                one.kill()
                one.wait()
        self.ports.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2)
    asked = parser.parse_args()
    job = GpuJob(Path(tempfile.mkdtemp(prefix="lost-gpu-worker-")))
    job.start()
    try:
        for number in range(1, asked.kills + 1):
            job.wait_for_steps(1, job.steps(1) + STEPS_BEFORE)
            made, killed = job.steps(1), job.kill(1)
            known = len(PART.findall(job.said(1)))
            # What was in flight may still be said; a step of the new process is one more.
            job.wait_for_steps(1, made + 2)
            whole = time.time() - killed
            parts, before = [], killed
            for name, at in PART.findall(job.said(1))[known:]:
                parts.append(f"{name} {float(at) - before:.1f}")
                before = float(at)
            sys.stdout.write(f"kill {number}: {whole:.1f} s until the second step after it: {', '.join(parts)}\n")
            sys.stdout.flush()
    finally:
        job.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as_program"]:
        program(sys.argv[2:])
    else:
        main()
