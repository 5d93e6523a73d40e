"""One rank over NCCL that misbehaves after some healthy steps: ``python -m programs.nccl_fault FAULT MARK``.

``raise``: it raises an error. ``sleep``: it sleeps in its own code. ``call``: a call of NCCL does not end, because the
GPU is busy with what was queued before it; two or three minutes later it goes on.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = 40
BUSY_CYCLES = 1_000_000_000
"""Of the GPU's clock: about half a second."""
BUSY_TIMES = 300


def misbehave(fault: str) -> None:
    if fault == "raise":
        raise ValueError("no such label: 11")
    if fault == "sleep":
        time.sleep(1e6)
    for _ in range(BUSY_TIMES):
        torch.cuda._sleep(BUSY_CYCLES)
    dist.all_reduce(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()


def main() -> None:
    fault, mark = sys.argv[1:]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(8, 512, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    with open(f"{mark}.new", "w") as file:
        file.write(str(time.time()))
    os.replace(f"{mark}.new", mark)
    misbehave(fault)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
