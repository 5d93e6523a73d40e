"""A small program of one's own, for tests that start it as real processes.

``python program.py [flags of the cluster] [--die | --raise | --exit | --close-all |
--seed-differs | --forget] [--with]``: prints its final parameter's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys

import torch
from torch import nn

import lockstep
from lockstep.library.sharding import MapShard


def main() -> None:
    ours, rest = lockstep.cluster_flags(sys.argv[1:])
    torch.set_num_threads(1)
    job = lockstep.join(startup_timeout=100, **ours)  # type: ignore[arg-type]  # flags are checked by their table
    with job if "--with" in rest else contextlib.nullcontext():
        train(job, rest)


def train(job: lockstep.Job, rest: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job.wrap(model, optimizer)
    odd = job.worker == 1 and "--seed-differs" in rest
    data = job.shard(torch.arange(64), 4, shuffle=True, seed=11 if odd else 10)
    assert isinstance(data, MapShard)
    for step in job.steps(5, seed=7):
        if step == 3 and job.worker == 1 and "--die" in rest:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and job.worker == 1 and "--raise" in rest:
            raise KeyError("labels")
        if step == 3 and job.worker == 1 and "--exit" in rest:
            sys.exit(5)
        if step == 3 and job.worker == 1 and "--close-all" in rest:
            os.closerange(3, 4096)
        loss = (model(torch.randn(4, 16)) + data[step].sum()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    sys.stdout.write(f"worker {job.worker} of {job.workers}: {digest}\n")
    sys.stdout.flush()
    if "--forget" not in rest:
        job.close()


if __name__ == "__main__":
    main()
