"""Plants a fault in a program that knows nothing of it: torch loads this at the end of its import, as it loads any
backend, and after a certain step of the optimizer rank 1 misbehaves. Standard library and torch only.

Variables: ``PLANT_FAULT``, and ``PLANT_MARK``, a file that says when it struck.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

AT = 60
BAD = "1"
_steps = 0
_groups: list[Any] = []


def start() -> None:
    """The entry point that torch calls."""
    if os.environ.get("PLANT_FAULT") and "RANK" in os.environ and multiprocessing.parent_process() is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: stepped(os.environ["PLANT_FAULT"]))


def stepped(fault: str) -> None:
    global _steps
    import torch.distributed as dist

    _steps += 1
    at, bad = 1 if fault == "always_slow" else AT, os.environ["RANK"] == BAD
    if _steps == 2 and fault == "opposite":
        _groups.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(2))
    if _steps == at:
        if bad:
            mark()
            misbehave(fault)
        else:
            others(fault)
    if bad and fault in ("slow", "always_slow") and _steps >= at:
        time.sleep(0.3)


def mark() -> None:
    path = os.environ["PLANT_MARK"]
    with open(f"{path}.new", "w") as file:
        file.write(str(time.time()))
    os.replace(f"{path}.new", path)


def misbehave(fault: str) -> None:
    """What the bad rank does."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "sleep":
        time.sleep(1e6)
    elif fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif fault == "loop":
        while True:
            sum(range(100))
    elif fault == "gil":
        ctypes.PyDLL(None).sleep(1000000)  # keeps the interpreter's lock, as a wrong extension module does
    elif fault == "loader":
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGSTOP)
    elif fault == "exit":
        sys.exit(0)
    else:
        _call(fault)


def _call(fault: str) -> None:
    import torch
    import torch.distributed as dist

    if fault == "other_shape":
        dist.all_reduce(torch.ones(5))
    elif fault == "other_dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.float64))
    elif fault == "opposite":
        dist.all_reduce(torch.ones(4), group=_groups[1])
        dist.all_reduce(torch.ones(4), group=_groups[0])


def others(fault: str) -> None:
    """What the other ranks do at that moment, where the fault needs them."""
    import torch
    import torch.distributed as dist

    if fault in ("other_shape", "other_dtype", "skip"):
        dist.all_reduce(torch.ones(4))
    elif fault == "opposite":
        dist.all_reduce(torch.ones(4), group=_groups[0])
        dist.all_reduce(torch.ones(4), group=_groups[1])
