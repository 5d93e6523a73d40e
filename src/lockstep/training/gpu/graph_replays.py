"""A CUDA graph that is replayed reads its parameters without any call of torch that could be watched.

So whoever leaves parameters to arrive later (``layer_waits.py``) is called before each replay. This replaces the method
of torch's class while anybody asks for it: whoever captured a graph, and whenever, replays it through that method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Before = Callable[[], None]

_asking: list[Before] = []
_replay: Any = torch.cuda.CUDAGraph.replay


def _replay_after(graph: torch.cuda.CUDAGraph) -> None:
    for before in list(_asking):
        before()
    _replay(graph)


def call_before_replays(before: Before) -> None:
    """Until ``stop_calling``."""
    _asking.append(before)
    torch.cuda.CUDAGraph.replay = _replay_after  # type: ignore[method-assign, assignment]


def stop_calling(before: Before) -> None:
    if before in _asking:
        _asking.remove(before)
    if not _asking:
        torch.cuda.CUDAGraph.replay = _replay  # type: ignore[method-assign]
