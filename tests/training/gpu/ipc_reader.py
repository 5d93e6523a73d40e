"""Opens the GPU memory of the process that started it."""

from __future__ import annotations

import sys

import torch

from lockstep.training.gpu.ipc_memory import CannotShareError, CudaMemoryPool


def main(handle: bytes, gpu: bytes, size: int) -> None:
    pool = CudaMemoryPool(torch.device("cuda", 0))
    memory = pool.open(handle, size)
    on_own_stream = torch.cuda.Stream()
    with torch.cuda.stream(on_own_stream):
        own = torch.empty_like(memory).copy_(memory)
    on_own_stream.synchronize()
    pool.close(memory)
    try:
        pool.open(handle, size + (64 << 20))
    except CannotShareError as error:
        refused = "refused" if "not tell" not in str(error) else str(error)
    else:
        refused = "not refused"
    same = "same GPU" if pool.gpu == gpu else "another GPU"
    sys.stdout.write(f"{same}, sum {int(own.long().sum())}, {refused}, closed\n")


if __name__ == "__main__":
    main(bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
