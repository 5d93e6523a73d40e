"""One thread, so that sums are made in one order."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    # What CUDA opens once for the whole process is nothing that a test left behind.
    torch.zeros(1, device="cuda", requires_grad=True).sum().backward()
    torch.cuda.Event(interprocess=True).ipc_handle()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
