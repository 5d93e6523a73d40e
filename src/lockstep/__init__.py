"""Synchronous PyTorch training on many machines that never waits in silence.

Your own script needs three lines::

    job = lockstep.join()
    model, optimizer = job.wrap(model, optimizer)
    for step in job.steps(1000): ...

``docs/library.md`` explains every name. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.cli.library_flags import cluster_flags as cluster_flags
    from lockstep.entry import join as join
    from lockstep.errors import BadInput as BadInput
    from lockstep.runtime.outcome import JobEndedError as JobEndedError
    from lockstep.training.library.errors import UsageError as UsageError
    from lockstep.training.library.job import Job as Job
    from lockstep.training.library.sharding import IterableShard as IterableShard
    from lockstep.training.library.sharding import MapShard as MapShard

_PUBLIC = {
    "BadInput": "lockstep.errors",
    "IterableShard": "lockstep.training.library.sharding",
    "Job": "lockstep.training.library.job",
    "JobEndedError": "lockstep.runtime.outcome",
    "MapShard": "lockstep.training.library.sharding",
    "UsageError": "lockstep.training.library.errors",
    "cluster_flags": "lockstep.cli.library_flags",
    "join": "lockstep.entry",
}

__all__ = [
    "BadInput",
    "IterableShard",
    "Job",
    "JobEndedError",
    "MapShard",
    "UsageError",
    "__version__",
    "cluster_flags",
    "join",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
