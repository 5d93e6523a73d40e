"""A program of the shape of nanoGPT's ``train.py``: settings are globals that ``--name=value`` overrides, batches are
cut out of one file of tokens, gradients accumulate over micro steps, and rank 0 estimates the loss now and then. As
data for tests of ``lockstep watch``: it knows nothing of it, nor of faults.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

wrap = "ddp"
max_iters = 100_000
eval_interval = 500
eval_iters = 4
accumulation = 2
batch_size = 2
block_size = 16
layers, heads, width, letters = 2, 2, 32, 65
learning_rate, warmup_iters, grad_clip = 1e-3, 10, 1.0

for argument in sys.argv[1:]:
    key, _, value = argument.removeprefix("--").partition("=")
    globals()[key] = type(globals()[key])(value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, time, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        made: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return made


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.letters(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.last(x)).flatten(0, 1), targets.flatten())


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - block_size - 1, (batch_size,)).tolist()
    rows = torch.stack([data[start : start + block_size + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss() -> float:
    return sum(float(raw_model(*get_batch())) for _ in range(eval_iters)) / eval_iters


def get_lr(step: int) -> float:
    if step < warmup_iters:
        return learning_rate * (step + 1) / warmup_iters
    return learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max_iters)))


dist.init_process_group(backend="gloo")
rank = dist.get_rank()
torch.manual_seed(1337 + rank)
path = os.path.join(tempfile.gettempdir(), f"char_gpt.{os.getpid()}.bin")
with open(path, "wb") as written:
    written.write(bytes(torch.randint(letters, (20_000,), dtype=torch.uint8).tolist()))
data = torch.from_file(path, size=20_000, dtype=torch.uint8)
os.unlink(path)
raw_model = Gpt()
model: Any = raw_model
if wrap == "fsdp":
    for one in raw_model.blocks:
        fully_shard(one)
    model = fully_shard(raw_model)
else:
    model = DistributedDataParallel(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

for iteration in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    if wrap == "ddp" and rank == 0 and iteration % eval_interval == 0:
        sys.stdout.write(f"step {iteration}: loss {estimate_loss():.4f}\n")
    for micro_step in range(accumulation):
        last = micro_step == accumulation - 1
        with contextlib.nullcontext() if last or wrap == "fsdp" else model.no_sync():
            loss = model(*get_batch()) / accumulation
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
