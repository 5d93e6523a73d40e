"""A program of which every rank trains, with checkpoints: ``--backend=``, ``--train_dir=``, ``--steps=``."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import lockstep

options = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Dropout(0.1), nn.Linear(30, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with lockstep.join(backend=options["backend"], train_dir=options["train_dir"], save_model_steps=3) as job:
    job.wrap(model, optimizer)
    for step in job.steps(int(options["steps"])):
        given = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + job.worker))
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()
    bits = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    sys.stdout.write(f"worker {job.worker}: {hashlib.sha256(bits).hexdigest()}\n")
    sys.stdout.flush()
