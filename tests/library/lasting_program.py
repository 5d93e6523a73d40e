"""A program of one's own with all that changes from step to step: batch-norm, dropout, a scheduler, shuffled data.
Its workers talk before the model is wrapped, in every step and between loops.

``python lasting_program.py [flags of the cluster] [--steps=N] [--die=WORKER:STEP:WHERE] [--outside] [--two]``: prints
each step that it makes and, at the end, a digest of its model. ``--die`` kills that worker before (``early``) or after
(``late``) its optimizer's step, or once the coordinator has heard all that it said in it (``called``), unless the file
that ``--once`` names is there. ``--outside`` makes a step of its own
before the loop, ``--two`` makes two in each iteration. ``--linger`` names a file that the chief waits for before it
closes; ``--hold`` one that all wait for in step 10. ``--pace=SECONDS``: how long each iteration takes at least.
``--clip`` clips by the norm of the mean, ``--state`` begins with a loaded state of the optimizer, and asks for it in
step 6 and after each loop.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import lockstep


class Options:
    """What is left of the command line."""

    def __init__(self, words: list[str]) -> None:
        given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        self.steps = int(given.get("steps", "12"))
        self.linger = Path(given.get("linger", "/"))
        self.hold = Path(given.get("hold", "/"))
        self.pace = float(given.get("pace", "0"))
        self.once = Path(given.get("once", "/nonexistent/once"))
        worker, step, self.where = given.get("die", "-1:-1:").split(":")
        self.worker, self.step = int(worker), int(step)
        self.outside = "--outside" in words
        self.two = "--two" in words
        self.clip = "--clip" in words
        self.state = "--state" in words

    def die_if_asked(self, job: lockstep.Job, step: int, where: str) -> None:
        if (job.worker, step, where) != (self.worker, self.step, self.where) or self.once.exists():
            return
        self.once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 16))


def digest(model: nn.Module) -> str:
    parts = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def state_digest(optimizer: torch.optim.Optimizer) -> str:
    state = optimizer.state_dict()["state"]
    parts = [repr(sorted((name, value.tolist()) for name, value in state[key].items())) for key in sorted(state)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def main() -> None:
    ours, rest = lockstep.cluster_flags(sys.argv[1:])
    options = Options(rest)
    torch.set_num_threads(1)
    job = lockstep.join(startup_timeout=100, **ours)  # type: ignore[arg-type]  # flags are checked by their table
    rate = job.broadcast(0.1 if job.is_chief else None, name="rate")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if options.state:  # a state from elsewhere goes to the servers when the model is wrapped
        for number, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.01 * number)
    job.wrap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 8], gamma=0.5)
    job.keep(scheduler=scheduler)
    data = job.shard(list(torch.arange(64.0).reshape(64, 1)), 4, shuffle=True, seed=3, collate=torch.stack)

    def backward(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(torch.randn(4, 16) + batch / 64) ** 2).mean().backward()

    if options.outside:
        backward(torch.ones(4, 1))
        optimizer.step()
    half = options.steps // 2
    pause = threading.Event()
    heard: list[list[int]] = []
    norms: list[float] = []
    heard_state: list[str] = []
    for count in (half, options.steps - half):
        for step in job.steps(count, seed=7, data=data):
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
            while step == 10 and not options.hold.exists():
                pause.wait(0.05)
            backward(next(iter(data)))
            assert job.all_reduce(step + job.worker, "max") == step + job.workers - 1
            options.die_if_asked(job, step, "early")
            if options.clip:
                norms.append(float(job.clip_grad_norm_(0.05)))
            optimizer.step()
            if options.state and step == 6:
                heard_state.append(state_digest(optimizer))
            if options.two:
                backward(torch.ones(4, 1))
                optimizer.step()
            options.die_if_asked(job, step, "late")
            assert job.gather(step) == [step] * job.workers
            options.die_if_asked(job, step, "called")
            scheduler.step()
            pause.wait(options.pace)
        heard.append(job.gather(len(heard) * 10 + job.worker, name="between loops"))
        if options.state:
            heard_state.append(state_digest(optimizer))
    rates = [group["lr"] for group in optimizer.param_groups]
    told = f"{heard}, norms {norms}, states {heard_state}" if options.clip else f"{heard}"
    sys.stdout.write(f"worker {job.worker} of {job.workers}: {digest(model)} at {rates}, heard {told}\n")
    sys.stdout.flush()
    while job.is_chief and not options.linger.exists():
        pause.wait(0.05)
    job.close()


if __name__ == "__main__":
    main()
