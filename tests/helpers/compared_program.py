"""A program for ``lockstep compare --program``: leaves its last parameters in the folder of its first argument."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import lockstep


def main(folder: Path, how: str) -> None:
    with lockstep.join() as job:
        torch.manual_seed(job.worker)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.wrap(model, optimizer)
        try:
            for _ in job.steps(1000):
                inputs = torch.randn(4, 4)
                outputs = model[2](model[1](model[0](inputs))) if how == "around" else model(inputs)
                outputs.square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            (folder / f"values-{job.worker}").write_bytes(values.numpy().tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
