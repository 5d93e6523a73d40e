"""``existing_loop.py`` on a cluster: ``torchrun --nproc-per-node=2 examples/existing_loop_distributed.py``."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def main() -> None:
    job = lockstep.join()
    torch.manual_seed(0)
    inputs = torch.randn(512, 20)
    dataset = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    job.wrap(model, optimizer)
    for epoch in range(10):
        for batch, targets in job.shard(dataset, batch_size=16):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
