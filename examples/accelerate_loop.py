"""accelerate's own loop over a Lockstep job: ``torchrun --nproc-per-node=2 examples/accelerate_loop.py``.

Two lines are Lockstep's: ``join`` before anything else, and ``attach``. ``--servers=1`` lets the first rank serve the
others; ``--ddp`` leaves both lines out, and accelerate uses DistributedDataParallel.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.benchmark.data.digits import BRIGHTEST, load_digits
from lockstep.integrations.accelerate import attach


def digits() -> TensorDataset:
    images, labels = load_digits()
    return TensorDataset(torch.tensor(images[:512], dtype=torch.float32) / BRIGHTEST, torch.tensor(labels[:512]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    asked = parser.parse_args()
    job = None if asked.ddp else lockstep.join(servers=asked.servers)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=asked.accumulate)
    if job is not None:
        attach(job, accelerator)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(digits(), batch_size=32, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(asked.epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), asked.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            if accelerator.is_main_process:
                print(f"loss {mean!r}", flush=True)
    if job is not None:
        job.close()


if __name__ == "__main__":
    main()
