"""The job whose dumps are under ``data``: three ranks over gloo, with one fault each. ``make_data.py`` starts it.

RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python train.py FAULT FOLDER
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FAULT, FOLDER = sys.argv[1], Path(sys.argv[2])
RECORDER: Any = torch._C._distributed_c10d  # without annotations
RANK = int(os.environ["RANK"])
ODD = RANK == 1
"""The rank with the fault."""
SECONDS_TO_HANG = 3.0
SECONDS_TO_LEAVE = 60.0
STEPS = 3


def main() -> None:
    limit = 2.0 if FAULT == "gave-up" else 600.0
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit))
    evaluation = dist.new_group([0, 1, 2], group_desc="evaluation")
    for _ in range(20 if FAULT.startswith("wrapped") else STEPS):
        train_step()
    if not FAULT.startswith("wrapped"):
        evaluate(evaluation)
    dist.barrier()
    leaving = threading.Thread(target=dump_and_leave)
    leaving.start()
    with contextlib.suppress(RuntimeError):  # of gloo, when another rank is gone or late
        fail(evaluation)
    leaving.join()


def train_step() -> None:
    dist.all_reduce(torch.ones(4))


def evaluate(group: dist.ProcessGroup) -> None:
    gathered = [torch.zeros(3) for _ in range(3)]
    dist.all_gather(gathered, torch.ones(3), group=group)


def own_code() -> None:
    """The fault: a rank that is elsewhere."""
    time.sleep(600)


def fail(evaluation: dist.ProcessGroup) -> None:
    match FAULT:
        case "healthy":
            train_step()
        case "slept" | "gave-up" | "wrapped":
            if ODD:
                own_code()
            train_step()
        case "wrapped-group":
            if ODD:
                own_code()
            dist.all_reduce(torch.ones(2), group=evaluation)
        case "skipped":
            if not ODD:
                dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))
            train_step()
        case "shape":
            dist.all_reduce(torch.ones(6 if ODD else 4))
        case "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.int32 if ODD else torch.float32))
        case "order":
            other = dist.new_group([0, 1, 2], group_desc="checkpoint")
            for group in (other, evaluation) if ODD else (evaluation, other):
                dist.all_reduce(torch.ones(2), group=group)
        case "died":
            if ODD:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step()


def dump_and_leave() -> None:
    time.sleep(SECONDS_TO_HANG)  # a hang is known by its time alone
    (FOLDER / f"trace_rank_{RANK}").write_bytes(RECORDER._dump_fr_trace(True, True, False))
    (FOLDER / f"trace_rank_{RANK}.json").write_bytes(RECORDER._dump_fr_trace_json(True, False))
    (FOLDER / f"done_{RANK}.txt").touch()
    living = 2 if FAULT == "died" else 3
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    while len(list(FOLDER.glob("done_*.txt"))) < living and time.monotonic() < deadline:
        threading.Event().wait(0.05)  # one that leaves ends the calls of the others
    os._exit(0)


if __name__ == "__main__":
    main()
