"""A program of the shape of transformers' examples without Trainer: accelerate prepares a small model, its data and its
optimizer, and the loop is one's own. With ``--fsdp`` torch shards the model. As data for tests of ``lockstep watch``:
it knows nothing of it, nor of faults.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def examples(count: int, length: int, letters: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(letters, (count, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--num_train_epochs", type=int, default=100)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    rows: Any = examples(6_000, 16, 64)
    data: Any = DataLoader(rows, shuffle=True, batch_size=2, num_workers=1)
    if args.fsdp:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-4)
        optimizer, data = accelerator.prepare(optimizer, data)
    else:
        model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-4), data)
    schedule = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, 10, 100_000))
    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(data):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 200 == 0:
                accelerator.print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
