"""A task that goes back with its job makes another node in the same process."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli import bench_task


@dataclass(frozen=True)
class Config:
    finished: bool = False


class Model:
    """In a cycle, as every wrapped model is."""

    def __init__(self) -> None:
        self.itself = self


def test_the_model_of_the_life_that_has_ended_is_gone_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next life freezes what is there when its steps begin: what is in a cycle then would stay."""
    models: list[weakref.ref[Model]] = []

    def train(_config: object, _node: object) -> int | None:
        if models:
            return 0 if models[0]() is None else 1
        models.append(weakref.ref(Model()))
        return None

    node = SimpleNamespace(start=lambda: None, close=lambda: None)
    monkeypatch.setattr("lockstep.runtime.task.worker_node.WorkerNode", lambda *_: node)
    monkeypatch.setattr(bench_task, "_train", train)
    monkeypatch.setattr(bench_task, "node_config", lambda *_, **__: Config())
    anything: Any = SimpleNamespace(attach=lambda _node: None)
    with _no_collector():
        assert bench_task._run_worker(anything, anything, anything, finished=False) == 0


@contextlib.contextmanager
def _no_collector() -> Any:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
