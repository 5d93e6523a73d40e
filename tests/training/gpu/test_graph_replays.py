"""Whoever asks is called before a CUDA graph is replayed, and torch's method is back when nobody asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.training.gpu import graph_replays
from lockstep.training.gpu.graph_replays import call_before_replays, stop_calling


def test_all_who_ask_are_called_before_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(graph_replays, "_replay", lambda _graph: called.append("replayed"))
    before, asking = torch.cuda.CUDAGraph.replay, [lambda: called.append("first"), lambda: called.append("second")]
    for one in asking:
        call_before_replays(one)
    replay: Any = torch.cuda.CUDAGraph.replay  # without a GPU there are no graphs, and any object will do
    replay(object())
    assert called == ["first", "second", "replayed"]
    stop_calling(asking[0])
    replay(object())
    assert called[3:] == ["second", "replayed"]
    monkeypatch.undo()
    stop_calling(asking[1])
    assert torch.cuda.CUDAGraph.replay is before
