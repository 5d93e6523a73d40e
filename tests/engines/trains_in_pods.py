"""A program of one's own that knows nothing of where it runs: ``lockstep.join()`` finds out.

``trains_in_pods.py STEPS [--until-lost]``: with that, it ends soon after a worker was lost and has come back.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import lockstep

AFTER = 20
"""How many steps a worker that has come back makes."""

torch.set_num_threads(1)
with lockstep.join(startup_timeout=200) as job:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.wrap(model, optimizer)
    first = None
    for step in job.steps(int(sys.argv[1]), seed=7):
        first = step if first is None else first
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(f"step {step}\n")
        sys.stdout.flush()
        # A worker that came back begins in the middle.
        came_back = int(first > 0 and step >= first + AFTER)
        if "--until-lost" in sys.argv and job.all_reduce(came_back, op="max"):
            break
