"""Short names of tasks and tensors, and the order of tasks."""

from __future__ import annotations

from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.keys import TensorKey


def short(name: str) -> str:
    """``worker 3``; a name that is none of a task stays as it is."""
    try:
        return TaskId.parse(name).short
    except ValueError:
        return name


def place(name: str) -> tuple[int, int, str]:
    """Servers first, then workers, by number."""
    try:
        task = TaskId.parse(name)
    except ValueError:
        return (2, 0, name)
    return (int(task.role is Role.WORKER), task.index, name)


def tensor(what: str) -> str:
    """``gradient/bucket_3 of worker 1``, of a tensor's key; anything else stays as it is."""
    try:
        key = TensorKey.parse(what)
    except ValueError:
        return what
    return f"{key.name} of {key.source.short}"
