"""Python's garbage collector and training in step: a pause of one task is a pause of all.

Every thirty steps or so Python looks through all objects for cycles. With torch loaded that takes 50 to 200 ms, in
which no thread of the process runs Python. What exists when training begins is mostly there to stay, so it is left out
of that; what is made later is looked through as always, in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def spare_collector() -> None:
    """Look through everything now, and from now on only through what is made later: for programs of others, which may
    have left large tensors in cycles."""
    gc.collect()
    gc.freeze()


def use_collector() -> None:
    """Everything counts again."""
    gc.unfreeze()


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """The same for a task of our own: nothing is looked through first, which a task that comes back has no time for."""
    gc.freeze()
    try:
        yield
    finally:
        use_collector()
