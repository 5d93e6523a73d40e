"""Clipping by the norm of the mean: what is measured, and what is decided once. ``messages.py`` has all messages."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.ids import Step


@dataclass(frozen=True, slots=True)
class Clip:
    """How the mean of a step is clipped before the optimizers get it: to this norm of all of it together (1, 2, inf),
    or, where ``norm_type`` is 0, each element to this value."""

    limit: float
    norm_type: float = 0.0

    @property
    def by_norm(self) -> bool:
        return self.norm_type > 0.0


@dataclass(frozen=True, slots=True)
class ShardNorm:
    """The norm of one shard's part of a mean."""

    shard: int
    norm: float


@dataclass(frozen=True, slots=True)
class PartialNorm:
    """Server to coordinator: the norm of my part of the mean of ``step``, as the workers' question ``number`` means it.

    ``change``: of the contributors (``Commit``) that the mean was made of; with second homes, the number of the view.
    ``parts``: with second homes, the norm of each shard: added up by shard, the norm has the same bits whoever is home.
    """

    step: Step
    number: int
    clip: Clip
    change: int
    norm: float
    parts: tuple[ShardNorm, ...] = ()


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """Coordinator to all: the norm of the whole mean of ``step``, and what every server multiplies its part by."""

    step: Step
    number: int
    norm: float
    scale: float
