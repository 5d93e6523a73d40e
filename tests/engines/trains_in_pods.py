"""A program of one's own that knows nothing of where it runs: ``lockstep.join()`` finds out."""

from __future__ import annotations

import sys

import torch
from torch import nn

import lockstep

torch.set_num_threads(1)
with lockstep.join(startup_timeout=200) as job:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.wrap(model, optimizer)
    for step in job.steps(int(sys.argv[1]), seed=7):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(f"step {step}\n")
        sys.stdout.flush()
