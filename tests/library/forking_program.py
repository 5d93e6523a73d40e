"""A program of one's own that forks, for tests that start it as a real process.

``python forking_program.py [flags of the cluster] CASE...``: prints each case and how many seconds it took.
``--plain`` instead of the flags: the same without Lockstep.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep

EPOCHS = 2
BATCH = torch.zeros(2, 4)

Train = Callable[[torch.Tensor], None]


class Numbers(Dataset[torch.Tensor]):
    """A few batches of numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@contextmanager
def training(flags: dict[str, Any] | None) -> Iterator[Train]:
    """One step of a small model, with the job or without it."""
    model: nn.Module = nn.Linear(4, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if flags is None:
        yield train
        return
    with lockstep.join(startup_timeout=100, **flags) as job:
        model, optimizer = job.wrap(model, optimizer)
        yield train


def loader(train: Train, workers: str, method: str) -> None:
    """Epochs of a data loader, as docs/from-ddp.md has it."""
    for _ in range(EPOCHS):
        for batch in DataLoader(Numbers(), batch_size=2, num_workers=int(workers), multiprocessing_context=method):
            train(batch)


def compute() -> None:
    """What a child does: nothing of the job."""
    BATCH.add(1)


def process(method: str) -> None:
    """A child of multiprocessing."""
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=compute)
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode


def fork(leave: Callable[[], object]) -> None:
    """A child of ``os.fork()`` that leaves as the test says."""
    child = os.fork()
    if not child:
        compute()
        leave()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status


def is_refused(train: Train) -> None:
    """A child that would train leaves with 0 where it is told that it cannot."""
    try:
        train(BATCH)
    except lockstep.UsageError as error:
        os._exit(0 if "in a forked process" in str(error) else 1)
    os._exit(1)


def run_case(train: Train, case: str) -> None:
    kind, *rest = case.split(":")
    if kind == "loader":
        loader(train, *rest)
    elif kind == "process":
        process(*rest)
    elif kind == "command":
        subprocess.run(["true"], check=True)
    elif kind == "fork":
        leave: dict[str, Callable[[], object]] = {
            "at-once": lambda: os._exit(0),
            "in-order": sys.exit,
            "training": lambda: is_refused(train),
        }
        fork(leave[rest[0]])


def main() -> None:
    plain = sys.argv[1] == "--plain"
    ours: dict[str, Any]
    ours, cases = ({}, sys.argv[2:]) if plain else lockstep.cluster_flags(sys.argv[1:])
    torch.set_num_threads(1)
    with training(None if plain else ours) as train:
        for case in cases:
            train(BATCH)
            began = time.monotonic()
            run_case(train, case)
            sys.stdout.write(f"{case} {time.monotonic() - began:.3f}\n")
            sys.stdout.flush()  # or a child would have it too, and write it once more
        train(BATCH)


if __name__ == "__main__":
    main()
