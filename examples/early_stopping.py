"""Handwritten digits until they are learned no better: workers evaluate together, and stop together.

Start it on one machine as two ranks, or with one server and two workers::

    torchrun --nproc-per-node=2 examples/early_stopping.py
    torchrun --nproc-per-node=3 examples/early_stopping.py --servers=1

Each worker evaluates its own part of the held-out digits. ``job.all_reduce`` makes the sum, which is the same on every
worker, and so is what follows from it: no worker can stop without the others.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.benchmark.data.digits import BRIGHTEST, load_digits


def load() -> tuple[Tensor, Tensor]:
    """Images as rows of 64 numbers, and labels, in the same order everywhere."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32).flatten(1)[order] / BRIGHTEST, torch.tensor(labels)[order]


def right_of(model: nn.Module, pictures: Tensor, labels: Tensor) -> int:
    """How many of these digits are recognised."""
    model.eval()
    with torch.no_grad():
        right = int((model(pictures).argmax(1) == labels).sum())
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="at most")
    parser.add_argument("--patience", type=int, default=2, help="epochs without progress after which it stops")
    parser.add_argument("--batch_size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--servers", type=int, default=0)
    asked = parser.parse_args()
    torch.manual_seed(1)
    pictures, labels = load()
    fifth = len(labels) // 5
    with lockstep.join(servers=asked.servers) as job:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        job.wrap(model, optimizer)
        training = TensorDataset(pictures[fifth:], labels[fifth:])
        data = job.shard(training, asked.batch_size, shuffle=True, drop_last=True)
        own = slice(job.worker, fifth, job.workers)
        best, since_best = 0.0, 0
        for epoch in range(1, asked.epochs + 1):
            for step in job.steps(len(data)):
                batch, targets = data[step]
                loss = nn.functional.cross_entropy(model(batch), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            right = job.all_reduce(right_of(model, pictures[own], labels[own]), "sum", name="validation") / fifth
            if job.is_chief:
                print(f"epoch {epoch}: {right:.1%} correct", flush=True)
            best, since_best = max(best, right), 0 if right > best else since_best + 1
            if since_best >= asked.patience:
                break
        ends = job.gather(job.step)
        print(f"worker {job.worker} stopped after {ends[job.worker]} steps, as all did: {ends}", flush=True)


if __name__ == "__main__":
    main()
