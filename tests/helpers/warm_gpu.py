"""What CUDA opens once for the whole process is nothing that a test left behind: it is opened before the first."""

from __future__ import annotations

import torch


def warm_gpu() -> None:
    """Does nothing without a GPU."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda", requires_grad=True).sum().backward()
        torch.cuda.Event(interprocess=True).ipc_handle()
