"""A program of one's own, for ``bench/chaos.py``: ``python bench/chaos_program.py STEPS RESULT FLAGS``."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn

import lockstep


def program(steps: int, result: Path, words: list[str]) -> None:
    """Calls, norms and states in every step; the chief leaves all of it in ``result``."""
    ours, _ = lockstep.cluster_flags(words)
    torch.set_num_threads(1)
    heard: list[object] = []
    with lockstep.join(bucket_mb=0.0625, **ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        torch.manual_seed(0)
        layers = [nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 256), nn.Dropout(0.2)]
        model = nn.Sequential(*layers, nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        job.wrap(model, optimizer)
        for step in job.steps(steps, seed=7):
            optimizer.zero_grad()
            (model(torch.randn(16, 64)) ** 2).mean().backward()
            norm = float(job.clip_grad_norm_(0.5))
            heard.append((step, norm, job.all_reduce(norm + job.worker)))
            optimizer.step()
            if step % 20 == 0:
                state = optimizer.state_dict()["state"]
                heard += [
                    (name, float(one.double().sum()))
                    for all_of in state.values()
                    for name, one in sorted(all_of.items())
                ]
        bits = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        if job.is_chief:
            result.write_text(f"{hashlib.sha256(bits).hexdigest()}\n{heard}\n")


if __name__ == "__main__":
    program(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
