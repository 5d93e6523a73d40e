"""A program of one's own that trains until it is ended: ``python endless_program.py [flags of the cluster]``."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import lockstep


def main() -> None:
    ours, rest = lockstep.cluster_flags(sys.argv[1:])
    torch.set_num_threads(1)
    with lockstep.join(startup_timeout=100, **ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job.wrap(model, optimizer)
        for step in job.steps(1_000_000):
            if step == 3:
                sys.stdout.write("training\n")
                sys.stdout.flush()
            if step == 3 and "--asleep" in rest and job.worker == 1:
                time.sleep(600)  # what a program may do for long, and nobody can ask it meanwhile
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
