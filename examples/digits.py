"""Handwritten digits (8 by 8 pixels) on every rank: 97 % correct on a held-out fifth.

Start it on one machine as two ranks, or alone with ``python``::

    torchrun --nproc-per-node=2 examples/digits.py

``job.shard`` divides the data set: every worker sees its own share, and all end at the same step.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.benchmark.data.digits import BRIGHTEST, load_digits


def load() -> tuple[Tensor, Tensor]:
    """Images and labels, in the same order everywhere."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(images, dtype=torch.float32).unsqueeze(1)[order] / BRIGHTEST
    return pictures, torch.tensor(labels)[order]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.25), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=32, help="images per worker and step")
    asked = parser.parse_args()
    torch.manual_seed(1)
    pictures, labels = load()
    fifth = len(labels) // 5
    with lockstep.join() as job:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        job.wrap(model, optimizer)
        training = TensorDataset(pictures[fifth:], labels[fifth:])
        data = job.shard(training, asked.batch_size, shuffle=True, drop_last=True)
        for step in job.steps(asked.epochs * len(data)):
            batch, targets = data[step]
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.is_chief and (step + 1) % len(data) == 0:
                print(f"epoch {(step + 1) // len(data)}: loss {loss.item():.4f}", flush=True)
        if job.is_chief:
            model.eval()
            with torch.no_grad():
                right = (model(pictures[:fifth]).argmax(1) == labels[:fifth]).float().mean().item()
            print(f"{right:.1%} of {fifth} held-out digits are correct", flush=True)


if __name__ == "__main__":
    main()
