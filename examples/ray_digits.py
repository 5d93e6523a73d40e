"""Handwritten digits on a Ray cluster: ``python examples/ray_digits.py --workers=2``, or by ``ray job submit``.

Without a cluster, Ray starts one on this machine. All that ``train`` needs is in it or can be imported on every node.
"""

from __future__ import annotations

import argparse

import lockstep.ray


def train() -> float:
    """What every task runs; returns the share of right answers. ``lockstep.join()`` does not return on a server."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from lockstep.benchmark.data.digits import BRIGHTEST, load_digits

    images, labels = (torch.tensor(each) for each in load_digits())
    pictures, fifth = images.float().flatten(1) / BRIGHTEST, len(labels) // 5
    torch.manual_seed(1)
    with lockstep.join() as job:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        job.wrap(model, optimizer)
        data = job.shard(TensorDataset(pictures[fifth:], labels[fifth:]), 32, shuffle=True, drop_last=True)
        for step in job.steps(8 * len(data)):
            batch, targets = data[step]
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.is_chief and (step + 1) % len(data) == 0:
                print(f"epoch {(step + 1) // len(data)}: loss {loss.item():.4f}", flush=True)
        with torch.no_grad():
            right = model(pictures[:fifth]).argmax(1) == labels[:fifth]
        return float(right.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    right, *_ = lockstep.ray.run(train, servers=asked.servers, workers=asked.workers)
    print(f"{right:.1%} of the held-out digits are correct")


if __name__ == "__main__":
    main()
