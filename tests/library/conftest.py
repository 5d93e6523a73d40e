"""One thread, so that sums are made in one order."""

from __future__ import annotations

import pytest
import torch

from helpers.warm_gpu import warm_gpu

warm_gpu()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
