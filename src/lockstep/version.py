"""The versions of this package and of what it runs with; torch-free, so that the monitor can read them."""

from __future__ import annotations

import functools

__version__ = "0.1.0"


_NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
"""Distributions that bring NIXL, by the CUDA that each was built for; one is enough."""


@functools.cache
def torch_version() -> str:
    """The installed torch version without its build (a server's CPU build and a worker's CUDA build are equal)."""
    return (_installed("torch") or "none").partition("+")[0]


def all_versions() -> str:
    """For people who report something: this version, and with which others it runs. Nothing of them is imported."""
    import platform

    nixl = next((f"NIXL {found} ({name})" for name in _NIXL if (found := _installed(name))), "no NIXL")
    others = ((_installed(name), label) for name, label in (("torch", "torch"), ("grpcio", "gRPC")))
    named = [f"{label} {found}" if found else f"no {label}" for found, label in others]
    return f"Lockstep {__version__} with {', '.join([*named, nixl])}, Python {platform.python_version()}"


def _installed(distribution: str) -> str | None:
    import importlib.metadata  # here, because a process that only starts others does not need it

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
