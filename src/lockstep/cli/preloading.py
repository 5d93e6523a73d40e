"""What a spare loads while it waits (``runtime/monitor/spare.py`` calls one of these by name).

Nothing here may start a thread, touch a GPU or draw a random number: the spare must become a task that cannot be told
from one that was started afresh.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Final

FOR_BENCH: Final = f"{__name__}:load_for_bench"
FOR_PROGRAM: Final = f"{__name__}:load_for_program"

_OF_BENCH: Final = (
    "lockstep.cli.bench_task",
    "lockstep.benchmark.training.run",
    "lockstep.runtime.task.server_node",
    "lockstep.runtime.task.worker_node",
    "lockstep.runtime.task.failures",
    "lockstep.transports.auto.transport",
)


def load_for_bench(words: Sequence[str]) -> None:
    """Everything that a server or a worker of this benchmark imports, its model's code, and its data, opened."""
    for module in _OF_BENCH:
        importlib.import_module(module)
    from lockstep.benchmark.models.registry import load_code
    from lockstep.benchmark.training.inputs import open_ahead
    from lockstep.cli.flags import parse_bench
    from lockstep.training.server.named_optimizer import warm_up
    from lockstep.training.torch_private import load_compiler

    config = parse_bench(words, os.environ)
    if config.devices.compile:
        load_compiler()
    warm_up()
    load_code(config.model, config.data_name)
    open_ahead(config)


def load_for_program(_words: Sequence[str]) -> None:
    """What a program of the library imports, and what torch imports with its first optimizer."""
    import torch

    importlib.import_module("lockstep.library.join")
    importlib.import_module("lockstep.library.job")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
