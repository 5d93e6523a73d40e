"""A program whose model is on a GPU: AdamW with clipping, some odd shapes, one parameter that is not always used."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import lockstep

LOOKED_AT = 12
"""Steps at the beginning, for which a rank may wait."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Linear(700, 700), nn.GELU(), nn.Linear(700, 64))
        self.sometimes = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.body(x)
        made = self.sometimes(x) if step % 3 else x
        assert isinstance(made, torch.Tensor)
        return made


def main() -> None:
    ours, rest = lockstep.cluster_flags(sys.argv[1:])
    with lockstep.join(startup_timeout=100, **ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        model = Model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        job.wrap(model, optimizer)
        for step in job.steps(10**6 if "--endless" in rest else 20, seed=7):
            x = torch.randn(32, 64).cuda()
            # The first steps are compared, and looked at.
            torch.cuda.set_sync_debug_mode("error" if "--refuse_waits" in rest and step > LOOKED_AT else "default")
            optimizer.zero_grad()
            # A parameter without a gradient makes a rank look whether others have one.
            nn.functional.mse_loss(model(x, 1 if "--refuse_waits" in rest else step), -x).backward()
            if "--clip" in rest:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        flat = torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
        norm = flat.double().norm().item()
        sys.stdout.write(f"worker {job.worker} of {job.workers}: {digest} norm {norm:.12g}\n")


if __name__ == "__main__":
    main()
