"""Many runs at once: each is a pure function of its arguments, so they are spread over processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

Answer = TypeVar("Answer")
_AHEAD = 4
"""How many jobs are handed out in advance, per process."""


def parallel(function: Callable[..., Answer], jobs: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Answer]:
    """The answers to all jobs, in order."""
    if processes == 1 or len(jobs) == 1:
        for job in jobs:
            yield function(*job)
        return
    # Not forked: this process may have threads (a progress bar) whose locks a copy would inherit.
    with ProcessPoolExecutor(min(processes, len(jobs)), get_context("spawn")) as pool:
        waiting = iter(jobs)
        running = [pool.submit(function, *job) for job in islice(waiting, processes * _AHEAD)]
        while running:
            yield running.pop(0).result()
            running += [pool.submit(function, *job) for job in islice(waiting, 1)]


@contextmanager
def no_collections() -> Iterator[None]:
    """A run leaves few cycles behind, and looking for them among a million live objects takes a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
