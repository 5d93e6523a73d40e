"""An ordinary training program for torchrun, DDP or FSDP2 over gloo, in which one rank can be told to misbehave.

It knows nothing of Lockstep: ``lockstep watch`` has to find out by itself. The same file plants its faults in programs
of others, which know nothing of it: as a module that torch loads at the end of its import, as it loads any backend
(``start``). Then ``PLANT_FAULT`` says which fault, and ``PLANT_MARK`` names the file that says when it struck.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLANTED_AT = 60
PLANTED_BAD = "1"
SLOW_SECONDS = 0.3


class RandomRows(Dataset[torch.Tensor]):
    """Random rows, for a process that loads them."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def misbehave(fault: str, groups: list[Any]) -> None:
    """What the bad rank does in the step of the fault."""
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
        # PyDLL keeps the interpreter's lock during the call, as a wrong extension module does.
        ctypes.PyDLL(None).sleep(1000000)
    elif fault == "loader":
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("no such label: 11")
    elif fault == "exit":
        sys.exit(0)
    elif fault == "other_shape":
        dist.all_reduce(torch.ones(5))
    elif fault == "other_dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.float64))
    elif fault == "opposite":
        dist.all_reduce(torch.ones(4), group=groups[1])
        dist.all_reduce(torch.ones(4), group=groups[0])


def others(fault: str, groups: list[Any]) -> None:
    """What the other ranks do in that step, where the fault needs them."""
    if fault in ("other_shape", "other_dtype", "skip"):
        dist.all_reduce(torch.ones(4))
    elif fault == "opposite":
        dist.all_reduce(torch.ones(4), group=groups[0])
        dist.all_reduce(torch.ones(4), group=groups[1])


def mark(path: str) -> None:
    """Say when the fault strikes."""
    if path:
        with open(f"{path}.new", "w") as file:
            file.write(str(time.time()))
        os.replace(f"{path}.new", path)


# -- in programs of others --


def start() -> None:
    """The entry point that torch calls."""
    fault = os.environ.get("PLANT_FAULT", "")
    if fault and "RANK" in os.environ and multiprocessing.parent_process() is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        planted = PlantedSteps(fault)
        register_optimizer_step_post_hook(lambda *_: planted.stepped())


class PlantedSteps:
    """Counts the steps of the optimizer; after one of them, rank 1 misbehaves."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.at = 1 if fault == "always_slow" else PLANTED_AT
        self.bad = os.environ["RANK"] == PLANTED_BAD
        self.steps = 0
        self.groups: list[Any] = []

    def stepped(self) -> None:
        self.steps += 1
        if self.steps == 2 and self.fault == "opposite":
            self.groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
        if self.steps == self.at:
            mark(os.environ["PLANT_MARK"] if self.bad else "")
            misbehave(self.fault, self.groups) if self.bad else others(self.fault, self.groups)
        if self.bad and self.fault in ("slow", "always_slow") and self.steps >= self.at:
            time.sleep(SLOW_SECONDS)


# -- its own loop --


def keep_dumping(folder: str, rank: int) -> None:
    """What a program has to do itself to have dumps over gloo before its time-out of half an hour."""
    from torch._C import _distributed_c10d as c10d

    while True:
        time.sleep(2.0)
        data = c10d._dump_fr_trace()  # type: ignore[attr-defined]  # the stubs of torch do not have it
        path = os.path.join(folder, f"rank_{rank}")
        with open(f"{folder}.new{rank}", "wb") as file:
            file.write(data)
        os.replace(f"{folder}.new{rank}", path)


def evaluate(kind: str, seconds: float) -> None:
    """On rank 0 only: it computes, or waits on a socket."""
    until = time.monotonic() + seconds
    if kind == "compute":
        while time.monotonic() < until:
            torch.randn(200, 200) @ torch.randn(200, 200)
    else:
        one, _other = socket.socketpair()
        one.settimeout(seconds)
        try:
            one.recv(1)
        except TimeoutError:
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="ddp")
    parser.add_argument("--fault", default="")
    parser.add_argument("--bad", type=int, default=1)
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--evaluate", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=int, default=0, help="print what a step takes, for each so many after --at")
    parser.add_argument("--dumps", default="", help="a folder for a dump of the flight recorder, every two seconds")
    parser.add_argument("--debug_port", type=int, default=0, help="of torch's debug server; needs aiohttp and tabulate")
    parser.add_argument("--mark", default="", help="a file that the bad rank makes when it misbehaves")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    bad = rank == args.bad
    torch.set_num_threads(1)
    if args.fault == "never_joins" and bad:
        mark(args.mark)
        time.sleep(1e6)
    dist.init_process_group("gloo")
    if args.dumps:
        threading.Thread(target=keep_dumping, args=(args.dumps, rank), daemon=True).start()
    if args.debug_port:
        from torch.distributed.debug import start_debug_server

        start_debug_server(args.debug_port, start_method="spawn")
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])] if args.fault == "opposite" else []
    model = model_of(args.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data: Iterator[torch.Tensor] = iter(())
    if args.fault == "loader":
        data = iter(DataLoader(RandomRows(), batch_size=8, num_workers=1))
    began, worked = time.perf_counter(), time.process_time()
    for step in range(args.steps):
        if step == (0 if args.fault == "always_slow" else args.at) and args.fault:
            mark(args.mark if bad else "")
            misbehave(args.fault, groups) if bad else others(args.fault, groups)
        if bad and (args.fault == "always_slow" or (args.fault == "slow" and step >= args.at)):
            time.sleep(SLOW_SECONDS)
        if step == args.at and rank == 0 and args.evaluate:
            evaluate(args.evaluate, args.seconds)
        batch = next(data) if args.fault == "loader" else torch.randn(8, 64)
        if args.pause:
            time.sleep(args.pause)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if args.times and step >= args.at and (step - args.at) % args.times == 0:
            now, work = time.perf_counter(), time.process_time()
            if step > args.at:
                took, used = (now - began) / args.times, (work - worked) / args.times
                # In one write: the lines of several ranks go the same way.
                sys.stdout.write(f"took {rank} {step} {time.time():.3f} {took:.7f} {used:.7f}\n")
                sys.stdout.flush()
            began, worked = time.perf_counter(), time.process_time()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
