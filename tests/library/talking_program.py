"""A program that talks to the other workers, through the job and through torch.distributed."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import lockstep


def main() -> None:
    ours, _ = lockstep.cluster_flags(sys.argv[1:])
    with lockstep.join(**ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        options = job.broadcast({"rate": 0.1} if job.is_chief else None, name="options")
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=options["rate"])
        job.wrap(model, optimizer)
        group = job.process_group()
        for _ in job.steps(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            mean = job.all_reduce(float(job.worker))
            total = torch.tensor([float(job.worker)])
            dist.all_reduce(total, group=group)
        said = (mean, total.item(), job.gather(job.worker), dist.get_world_size(), dist.get_backend())
        sys.stdout.write(f"worker {job.worker}: {said}\n")
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
