"""A program of the shape of PyTorch's DDP tutorial for torchrun: a Trainer with epochs, a sampler and a snapshot. As
data for tests of ``lockstep watch``: it knows nothing of it, nor of faults.

    torchrun ... multi_rank_tutorial.py EPOCHS SAVE_EVERY [--fsdp] [--snapshot=PATH]
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.nn.functional as F  # noqa: N812 - as programs have it
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

Pair = tuple[torch.Tensor, torch.Tensor]


class Line(Dataset[Pair]):
    """Noisy points of one plane, always the same."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.rand(size, 20, generator=generator)
        self.values = self.points.sum(1, keepdim=True) + 0.1 * torch.rand(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Pair:
        return self.points[index], self.values[index]


class Trainer:
    def __init__(self, model: nn.Module, data: DataLoader[Pair], save_every: int, snapshot: str, shard: bool) -> None:
        self.rank = int(os.environ["RANK"])
        self.data = data
        self.save_every = save_every
        self.snapshot = snapshot
        if shard:
            fully_shard(model)
        self.model = model if shard else DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            self._epoch(epoch)
            if self.snapshot and self.rank == 0 and epoch % self.save_every == 0:
                torch.save({"epoch": epoch, "optimizer": self.optimizer.state_dict()}, self.snapshot)

    def _epoch(self, epoch: int) -> None:
        if self.rank == 0:
            sys.stdout.write(f"epoch {epoch}, {len(self.data)} batches\n")
        sampler = self.data.sampler
        assert isinstance(sampler, DistributedSampler)
        sampler.set_epoch(epoch)
        for source, target in self.data:
            self._batch(source, target)

    def _batch(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.model(source), target).backward()
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--snapshot", default="")
    args = parser.parse_args()
    init_process_group("gloo")
    points = Line(50_000)
    data = DataLoader(points, batch_size=8, shuffle=False, sampler=DistributedSampler(points), num_workers=1)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    Trainer(model, data, args.save_every, args.snapshot, args.fsdp).train(args.epochs)
    destroy_process_group()


if __name__ == "__main__":
    main()
