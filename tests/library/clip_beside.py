"""A small GPT twice in each worker: as a job with servers that clips with ``job.clip_grad_norm_``, and with DDP.

Prints the largest relative difference of their losses.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.training.ranks.listening import reach_store

STEPS, WIDTH, LENGTH, TOKENS, GRAD_CLIP = 12, 32, 16, 65, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        normed = self.first(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        out: Tensor = hidden + self.wide(self.second(hidden))
        return out


class Gpt(nn.Module):
    """With tied weights, as nanoGPT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        out: Tensor = self.head(self.blocks(hidden))
        return out


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def loss_of(model: nn.Module, step: int, worker: int) -> Tensor:
    tokens = torch.randint(0, TOKENS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(97 * step + worker))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    torch.set_num_threads(1)
    flags, _ = lockstep.cluster_flags(sys.argv[1:])
    with lockstep.join(**flags) as job:  # type: ignore[arg-type]  # flags are checked by their table
        torch.manual_seed(5)
        ours = Gpt()
        theirs = copy.deepcopy(ours)
        store = reach_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, 60.0)
        dist.init_process_group(
            "gloo", store=c10d.PrefixStore("beside", store), rank=job.worker, world_size=job.workers
        )
        ddp = DistributedDataParallel(theirs)
        first, second = optimizer_of(ours), optimizer_of(theirs)
        job.wrap(ours, first)
        worst = clipped = 0.0
        for step in range(STEPS):
            losses = []
            for model, optimizer in ((ours, first), (ddp, second)):
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss_of(model, step, job.worker))
                losses[-1].backward()
            norm = job.clip_grad_norm_(GRAD_CLIP)
            expected = nn.utils.clip_grad_norm_(theirs.parameters(), GRAD_CLIP)
            first.step()
            second.step()
            assert abs(float(norm) - float(expected)) < 1e-5 * float(expected), (step, float(norm), float(expected))
            clipped += float(norm) > GRAD_CLIP
            worst = max(worst, abs(losses[0].item() / losses[1].item() - 1))
        sys.stdout.write(
            f"worker {job.worker}: {clipped:.0f} steps clipped, losses differ by a factor of {worst:.3e}\n"
        )
        sys.stdout.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
