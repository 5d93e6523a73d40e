"""The loop that all programs here share, as in nanoGPT: decay for matrices only, warm-up and cosine, clipping, AdamW.

AdamW is torch's fused one everywhere, because that is what servers run, so that all systems run the same kernel.

After its steps a process prints one line, ``result {...}``, which ``bench/own_program.py`` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from programs.pausing import wait_until_looked_at
from programs.systems import SYSTEMS, Alone

RESULT = "result "
LEARNING_RATE, DECAY, CLIP = 3e-4, 0.1, 1.0

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one program trains."""

    build: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Callable[[], Batch]]
    """From a generator of random numbers, a function that makes the next batch, on the host."""
    loss: Callable[[nn.Module, Batch], Tensor]
    channels_last: bool = False


def options(about: str | None, **sizes: int) -> argparse.ArgumentParser:
    """The options of every program; ``sizes`` are further ones of this program, with their defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, default="plain")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--warm_up", type=int, default=8, help="steps before them")
    parser.add_argument("--float32", action="store_true", help="on a GPU: no autocast to bfloat16")
    parser.add_argument("--no_fused", action="store_true", help="AdamW as torch chooses; servers run the fused one")
    parser.add_argument("--ddp_backend", choices=("", "nccl", "gloo"), default="")
    parser.add_argument("--ddp_views", action="store_true", help="DDP's gradient_as_bucket_view")
    parser.add_argument("--range", action="store_true", help="count steps with range(), not with job.steps()")
    parser.add_argument(
        "--job_clips", action="store_true", help="under Lockstep: job.clip_grad_norm_() even if torch's does the same"
    )
    parser.add_argument("--join", action="append", default=[], metavar="NAME=VALUE", help="for lockstep.join()")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def main(asked: argparse.Namespace, recipe: Recipe) -> None:
    """Join, train, tell the result."""
    try:
        system = SYSTEMS[asked.system](asked)
    except SystemExit:  # this process has served until the job ended
        _tell({"serves": True})
        raise
    _tell({"rank": system.rank, **_train(asked, recipe, system)})


def _train(asked: argparse.Namespace, recipe: Recipe, system: Alone) -> dict[str, Any]:
    device = system.device
    _set_up(device)
    torch.manual_seed(1)
    model = recipe.build().to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = make_optimizer(model, fused=not asked.no_fused)
    parameters = [*model.parameters()]
    model = system.wrap(model, optimizer)
    # Not torch's own generator, which job.steps() seeds: every system shall draw its batches in the same way.
    next_batch = recipe.batches(torch.Generator().manual_seed(1000 + system.rank))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and not asked.float32)
    total = asked.warm_up + asked.steps
    began = worked = 0.0
    for step in system.steps(total):
        if step == asked.warm_up:
            _finish(device)
            began, worked = time.perf_counter(), time.process_time()
        rate = learning_rate(step, total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = tuple(_on(device, part, recipe.channels_last) for part in next_batch())
        with autocast:
            loss = recipe.loss(model, batch)
        loss.backward()
        system.clip(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    _finish(device)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    wait_until_looked_at(system.rank)
    system.close()
    return {
        "ms_per_step": 1000 * seconds / asked.steps,
        "processor_ms_per_step": 1000 * worked / asked.steps,
        "steps": asked.steps,
        "loss": loss.item(),
        "parameters": sum(p.numel() for p in parameters),
    }


def make_optimizer(model: nn.Module, *, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and the scales of norms alone."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    # None is torch's own choice of kernel.
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True if fused else None)


def learning_rate(step: int, total: int) -> float:
    """A tenth of the run warms up, the rest is a cosine."""
    ramp = max(1, total // 10)
    if step < ramp:
        return LEARNING_RATE * (step + 1) / ramp
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - ramp) / max(1, total - ramp))))


def _set_up(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def _on(device: torch.device, part: Tensor, channels_last: bool) -> Tensor:
    if device.type == "cpu":
        return part
    moved = part.to(device, non_blocking=True)  # the batches are in pinned memory where there is a GPU
    is_image = channels_last and moved.dim() == 4
    return moved.contiguous(memory_format=torch.channels_last) if is_image else moved


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tell(result: Mapping[str, Any]) -> None:
    memory = {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_initialized():
        memory["gpu_allocated"] = torch.cuda.max_memory_allocated()
        memory["gpu_reserved"] = torch.cuda.max_memory_reserved()
    print(RESULT + json.dumps({**result, "memory": memory}), flush=True)
