"""GPU memory between two processes: opened, read, refused, given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.warm_gpu import warm_gpu
from lockstep.training.gpu.ipc_memory import HANDLE_BYTES, CannotShareError, CudaMemoryPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(120),
]

SIZE = 64 << 20
READER = Path(__file__).with_name("ipc_reader.py")

warm_gpu()


def read_by_another(handle: bytes, gpu: bytes, **environment: str) -> str:
    command = [sys.executable, str(READER), handle.hex(), gpu.hex(), str(SIZE)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_another_process_reads_the_memory_and_only_as_much_as_there_is(segments: str) -> None:
    pool = CudaMemoryPool(torch.device("cuda", 0))
    memory = pool.allocate(SIZE)
    assert not bool(memory.any())
    memory.copy_(torch.arange(SIZE, device="cuda") % 251)
    torch.cuda.synchronize()
    expected = int(memory.long().sum())
    environment = {"PYTORCH_CUDA_ALLOC_CONF": segments} if segments else {}
    said = read_by_another(pool.handle_of(memory), pool.gpu, **environment)
    assert said == f"same GPU, sum {expected}, refused, closed"
    pool.free(memory)


def test_freed_memory_is_free() -> None:
    pool = CudaMemoryPool(torch.device("cuda", 0))
    before = torch.cuda.memory_reserved()
    memory = pool.allocate(1 << 30)
    free = torch.cuda.mem_get_info()[0]
    pool.free(memory)
    assert torch.cuda.mem_get_info()[0] - free >= 1 << 29
    assert torch.cuda.memory_reserved() == before


def test_what_cuda_refuses_is_said_and_leaves_torch_alone() -> None:
    pool = CudaMemoryPool(torch.device("cuda", 0))
    with pytest.raises(CannotShareError, match="64 bytes, not 3"):
        pool.open(b"abc", 1)
    with pytest.raises(CannotShareError, match="cudaIpcOpenMemHandle: "):
        pool.open(bytes(HANDLE_BYTES), 1)
    with pytest.raises(CannotShareError, match="cudaMalloc: out of memory"):
        pool.allocate(1 << 50)
    assert float(torch.ones(3, device="cuda").sum()) == 3
