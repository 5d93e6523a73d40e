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
    from lockstep.errors import BadInput as BadInput
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.library.errors import UsageError as UsageError
    from lockstep.library.job import Job as Job
    from lockstep.library.join import join as join
    from lockstep.library.sharding import IterableShard as IterableShard
    from lockstep.library.sharding import MapShard as MapShard
    from lockstep.runtime.task.outcome import JobEndedError as JobEndedError

_PUBLIC = {
    "BadInput": "lockstep.errors",
    "IterableShard": "lockstep.library.sharding",
    "Job": "lockstep.library.job",
    "JobEndedError": "lockstep.runtime.task.outcome",
    "LockstepError": "lockstep.errors",
    "MapShard": "lockstep.library.sharding",
    "UsageError": "lockstep.library.errors",
    "cluster_flags": "lockstep.cli.library_flags",
    "join": "lockstep.library.join",
}

__all__ = [
    "BadInput",
    "IterableShard",
    "Job",
    "JobEndedError",
    "LockstepError",
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
