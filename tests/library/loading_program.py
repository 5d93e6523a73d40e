"""A program of one's own whose batches come from the processes of a DataLoader: ``python loading_program.py [flags]``.

``--own-grpc``: it has used gRPC itself before, in its own way.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


def use_grpc() -> None:
    import grpc

    with grpc.insecure_channel("127.0.0.1:1"):
        pass


def main() -> None:
    if "--own-grpc" in sys.argv:
        use_grpc()
    import lockstep

    ours, _ = lockstep.cluster_flags(sys.argv[1:])
    torch.set_num_threads(1)
    with lockstep.join(startup_timeout=100, **ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job.wrap(model, optimizer)
        for _ in range(3):
            for batch in DataLoader(torch.ones(8, 4), batch_size=2, num_workers=2):  # type: ignore[arg-type]
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    sys.stdout.write("trained\n")


if __name__ == "__main__":
    main()
