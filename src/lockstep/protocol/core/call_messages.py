"""Calls that all workers make: ``job.all_reduce`` and the like. ``messages.py`` has all messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class CallPlace:
    """Where in its program a worker makes a call: equal on all workers, and in every incarnation of a worker.

    ``loop``: how many loops over its steps the program has begun; ``iteration``: the one it is in, or
    ``calls.OUTSIDE_LOOPS``; ``number``: how many calls it has already made there. Calls are made in this order.
    """

    loop: int
    iteration: int
    number: int


@dataclass(frozen=True, slots=True)
class CallMade:
    """Worker to coordinator: I have come to this call, and bring this value; ``held``: which you have already.

    ``operation``, ``form`` (what its values must have in common) and ``name`` must be equal on all workers; ``where``
    is a file and a line, for people.
    """

    place: CallPlace
    operation: str
    form: str
    name: str
    where: str
    data: bytes
    held: bool = False


@dataclass(frozen=True, slots=True)
class CallOpen:
    """Coordinator to a worker that is in this call: these workers (their indices, the first few) have not come."""

    place: CallPlace
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallComplete:
    """Coordinator to a worker that is in this call: what each worker brought, in the order of their indices."""

    place: CallPlace
    workers: tuple[int, ...]
    values: tuple[bytes, ...]
