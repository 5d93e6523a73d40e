"""Trains the same model twice in each of two processes: as a job in which every rank trains, and with DDP over gloo.

Prints ``same bits`` if gradients, parameters and buffers are equal after every step.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

STEPS, PASSES = 6, 2


class Net(nn.Module):
    """With dropout, statistics, tied weights, and a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.BatchNorm1d(16)
        self.side = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, side: bool) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.embed(tokens)), 0.1)
        out: Tensor = self.head(hidden + self.side(hidden) if side else hidden)
        return out


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]


def a_step(model: Any, optimizer: torch.optim.Optimizer, step: int, rank: int, alone: Any, clip: Any) -> None:
    """Two backward passes, the first of which is not averaged; then clipping, and the update."""
    optimizer.zero_grad()
    torch.manual_seed(1000 * step + rank)
    for number in range(PASSES):
        tokens = torch.randint(0, 32, (8,))
        with alone(number < PASSES - 1):
            loss = nn.functional.cross_entropy(model(tokens, side=step % 2 == 0), tokens)
            (loss / PASSES).backward()
    clip(0.5)
    optimizer.step()


def _only_if(enter: Callable[[], Any]) -> Callable[[bool], Any]:
    return lambda alone: enter() if alone else contextlib.nullcontext()


def _clip_of(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


def main() -> None:
    torch.set_num_threads(1)
    ours_flags, _ = lockstep.cluster_flags(sys.argv[1:])
    with lockstep.join(**ours_flags) as job:  # type: ignore[arg-type]  # flags are checked by their table
        torch.manual_seed(5 + job.worker)
        ours = Net()
        theirs = copy.deepcopy(ours)
        # Without find_unused_parameters DDP refuses such a model.
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
        first = torch.optim.AdamW(groups(ours), lr=0.01)
        second = torch.optim.AdamW(groups(theirs), lr=0.01)
        job.wrap(ours, first)
        for step in job.steps(STEPS, seed=None):
            a_step(ours, first, step, job.worker, _only_if(job.accumulate), job.clip_grad_norm_)
            a_step(ddp, second, step, job.worker, _only_if(ddp.no_sync), _clip_of(ddp))
            for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert torch.equal(one, other), f"{name} differs in step {step}"
                assert (one.grad is None) == (other.grad is None), f"{name} in step {step}: {one.grad} {other.grad}"
                assert one.grad is None or torch.equal(one.grad, other.grad), f"the gradient of {name} in step {step}"  # type: ignore[arg-type]
        # DDP copies the chief's buffers when the next forward begins, which is not made here.
        if job.is_chief:
            assert all(torch.equal(one, other) for one, other in zip(ours.buffers(), theirs.buffers(), strict=True))
        sys.stdout.write(f"worker {job.worker}: same bits after {job.step} steps\n")
        sys.stdout.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
