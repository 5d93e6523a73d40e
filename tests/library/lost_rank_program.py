"""A rank that kills itself once, at a moment of a step: ``--die=RANK:STEP:MOMENT``, several with commas.

Moments: ``begin`` and ``forward`` (before the word of the step), ``backward`` (after it), ``stepped``, ``end``. Prints
a digest of all that it has in the end: parameters, buffers, optimizer, schedule, and sums that only this rank has.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep

STEPS = 12


class Sums:
    """What this rank alone has: of its losses, and of the norms of the means."""

    def __init__(self) -> None:
        self.losses = self.norms = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = state["losses"], state["norms"]


def main() -> None:
    ours, rest = lockstep.cluster_flags(sys.argv[1:])
    given = dict(word.removeprefix("--").split("=", 1) for word in rest)
    torch.set_num_threads(1)
    with lockstep.join(startup_timeout=100, **ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        train(job, given.get("die", "").split(","), Path(given["once"]))


def train(job: lockstep.Job, deaths: list[str], once: Path) -> None:
    def reach(step: int, moment: str) -> None:
        name = f"{job.worker}:{step}:{moment}"
        if name in deaths and not (mark := once / name.replace(":", "-")).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(job.worker)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.wrap(model, optimizer)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7], gamma=0.5)
    sums = Sums()
    job.keep(schedule=schedule, sums=sums)
    for step in job.steps(STEPS, seed=7):
        say(f"step {step}")
        reach(step, "begin")
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 16)) ** 2).mean()
        reach(step, "forward")
        loss.backward()
        sums.losses += loss.item() + job.all_reduce(loss.item())
        sums.norms += nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        reach(step, "backward")
        optimizer.step()
        sums.norms += job.all_reduce(sums.norms)
        reach(step, "stepped")
        schedule.step()
        reach(step, "end")
    say(f"rank {job.worker}: {digest(model, optimizer)} {sums.losses!r} {sums.norms!r} {schedule.get_last_lr()}")


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += state.values()
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
