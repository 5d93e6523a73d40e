"""The versions of this package and of torch; torch-free, so that the monitor can read them."""

from __future__ import annotations

import functools

__version__ = "0.1.0"


@functools.cache
def torch_version() -> str:
    """The installed torch version without its build (a server's CPU build and a worker's CUDA build are equal)."""
    import importlib.metadata  # here, because a process that only starts others does not need it

    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"
