"""Names of settings that get special treatment when two tasks are compared; all others only have to be equal."""

from __future__ import annotations

from lockstep.protocol.core.ids import Role, TaskId

LOCKSTEP_VERSION = "lockstep version"
TORCH_VERSION = "torch version"
SERVERS = "number of servers"
WORKERS = "number of workers"

VERSIONS = frozenset({LOCKSTEP_VERSION, TORCH_VERSION})
"""Settings that differ because different programs are installed."""
COUNTS = frozenset({SERVERS, WORKERS})
"""Settings that follow from the host lists, which are compared entry by entry."""

SEED = "seed"
SERVER_DEVICE = "device of servers"
"""Both homes of a shard must make the same bits, which two kinds of devices do not."""
_OF_WORKERS = frozenset({SEED})
"""Settings that servers have no use for, and may be started without."""
_OF_SERVERS = frozenset({SERVER_DEVICE})
"""The same of workers."""


def concerns(name: str, task: TaskId) -> bool:
    """Whether this task must have the same value of the setting as all others that it concerns."""
    return name not in (_OF_SERVERS if task.role is Role.WORKER else _OF_WORKERS)
