"""What differs between the ways to run one program: how a process joins, wraps its model, counts its steps, and leaves.

Everything else (model, data, clipping, optimizer, autocast) is the same code in all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

PATIENCE = timedelta(seconds=300)


class Alone:
    """A plain loop; several such processes do not know of one another."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self.rank = int(os.environ.get("RANK", "0"))

    @property
    def device(self) -> torch.device:
        """The GPU of this process, or one that it shares if there are fewer of them."""
        if self._asked.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:  # noqa: ARG002
        return model

    def steps(self, count: int) -> Iterable[int]:
        return range(count)

    def clip(self, parameters: list[nn.Parameter], most: float) -> None:
        nn.utils.clip_grad_norm_(parameters, most)

    def close(self) -> None:
        pass


class UnderDdp(Alone):
    """PyTorch's DistributedDataParallel: NCCL where every rank has a GPU of its own, else gloo."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__(asked)
        world = int(os.environ["WORLD_SIZE"])
        shared = asked.device == "cpu" or torch.cuda.device_count() < world
        if asked.device == "cuda":
            torch.cuda.set_device(self.device)
        distributed.init_process_group(
            asked.ddp_backend or ("gloo" if shared else "nccl"), rank=self.rank, world_size=world, timeout=PATIENCE
        )

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:  # noqa: ARG002
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=self._asked.ddp_views)

    def close(self) -> None:
        distributed.destroy_process_group()


class UnderLockstep(Alone):
    """``lockstep.join()``; a process that serves does not come back from it."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__(asked)
        servers = 1 if asked.system == "lockstep-servers" else 0
        self._job = lockstep.join(servers=servers, **join_options(asked.join))
        self.rank = self._job.worker
        self._job_clips = asked.job_clips or (servers > 0 and self._job.workers > 1)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        wrapped, _ = self._job.wrap(model, optimizer)
        return wrapped

    def steps(self, count: int) -> Iterable[int]:
        return range(count) if self._asked.range else self._job.steps(count)

    def clip(self, parameters: list[nn.Parameter], most: float) -> None:
        """The mean, as DDP's program does. Where a server makes it from several workers' gradients, only the job can;
        torch's own function would clip each worker's share."""
        if self._job_clips:
            self._job.clip_grad_norm_(most)
        else:
            super().clip(parameters, most)

    def close(self) -> None:
        self._job.close()


SYSTEMS: dict[str, type[Alone]] = {
    "plain": Alone,
    "ddp": UnderDdp,
    "lockstep": UnderLockstep,
    "lockstep-servers": UnderLockstep,
}


def join_options(given: list[str]) -> dict[str, Any]:
    """``bucket_mb=16`` and ``device=gpu`` as keyword arguments of ``lockstep.join``."""
    options: dict[str, Any] = {}
    for each in given:
        name, _, text = each.partition("=")
        options[name] = text
        with contextlib.suppress(json.JSONDecodeError):
            options[name] = json.loads(text)
    return options
