"""A GPT-2 of transformers in an ordinary loop: ``torchrun --nproc-per-node=2 examples/transformers_loop.py``.

``--servers=1`` lets the first rank serve the others; ``--ddp`` trains the same with DistributedDataParallel instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep

LENGTH, VOCABULARY = 16, 64


def sequences() -> list[torch.Tensor]:
    """Each counts on from its first number, in strides of 1 to 4."""
    return [(torch.arange(LENGTH) * (1 + n % 4) + n) % VOCABULARY for n in range(192)]


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", help="a file for model and optimizer; training goes on from it if it exists")
    return parser.parse_args()


def main() -> None:
    asked = flags()
    job: Any = None
    if asked.ddp:
        torch.distributed.init_process_group()
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        job = lockstep.join(servers=asked.servers)
        rank, world = job.worker, job.workers
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if asked.save and Path(asked.save).exists():
        saved = torch.load(asked.save)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    network = model
    if job is None:
        network = DistributedDataParallel(model)
    else:
        job.wrap(model, optimizer)
    torch.manual_seed(2 + rank + first)
    data: Any = sequences()  # a list will do
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank)
    for epoch in range(first, first + asked.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=8, sampler=sampler):
            loss = network(input_ids=batch, labels=batch).loss
            loss.backward()
            if asked.servers:
                job.clip_grad_norm_(asked.clip)  # they have the mean
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), asked.clip)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"loss {loss.item()!r}", flush=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": first + asked.epochs}
    if asked.save and rank == 0:
        torch.save(state, asked.save)
    if job is not None:
        job.close()


if __name__ == "__main__":
    main()
