"""What differs between the two ways in which a job trains: on servers, or on every rank.

``Job`` keeps what both have: who this is, loops, data, the end. What ``wrap``, ``optimizer.step()`` and the optimizer's
state mean is decided by one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.library.atexit import ExitWitness
from lockstep.library.loop_position import LoopTracker
from lockstep.library.sharding import MapShard
from lockstep.protocol.core.ids import JobId, Step
from lockstep.training.ranks.saving import SaveSlot

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of one task; what must be equal on all tasks is in the node's settings."""

    on_nan: str = "report"
    on_nan_parameters: str = "stop"
    bucket_bytes: int | None = None
    """None: chosen for the model and the cluster."""
    wire_dtype: str = "float32"
    own_copy: bool = False
    backend: str | None = None
    """Without servers, what carries the gradients; None: what fits."""
    find_store: Callable[[JobId, int], tuple[str, int]] | None = None
    """Without servers, how worker 0 tells the others where its store is; None: at an agreed port."""
    save_slot: SaveSlot = field(default_factory=SaveSlot)
    """Without servers, where the node's store finds what to save."""


@dataclass(slots=True)
class StepCounts:
    """What a job counts for its program."""

    not_finite: int = 0
    void: int = 0
    missed: int = 0
    catch_up: Callable[[], None] = lambda: None
    """Counts what is not counted yet, because a GPU had not computed it; may wait for that."""


@dataclass(frozen=True, slots=True)
class JobParts:
    """What ``Job`` lends to the way in which it trains."""

    options: JobOptions
    say: Say
    course: LoopTracker
    exits: ExitWitness
    shards: Iterable[MapShard]
    """The shards that the program uses."""
    counts: StepCounts
    refuse_in_child: Callable[[str], None]
    meet: Callable[[str], None]
    """Block until all workers have come to the call of this name."""


@dataclass(frozen=True, slots=True)
class NormClip:
    """What ``job.clip_grad_norm_`` was given; the names are torch's."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    foreach: bool | None
    optimizer: torch.optim.Optimizer | None


class TrainingWay(Protocol):
    """One worker's model and optimizers in training."""

    @property
    def step(self) -> Step:
        """The number of steps that have been made."""

    @property
    def announced(self) -> bool:
        """Whether the other tasks know this worker's model, so that it cannot be another one any more."""

    def wrap(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """Block until the chief's parameters are in the models. UsageError if they cannot be trained this way; then
        models and optimizers are as they were."""

    def publish(self) -> None:
        """Copy the chief's current parameters to all workers."""

    def clip_norm(self, asked: NormClip) -> Tensor:
        """Clip the mean of all workers' gradients to this norm, in the next step; returns the norm that it has."""

    def clip_value(self, value: float, optimizer: torch.optim.Optimizer | None, foreach: bool | None) -> None:
        """Clip each element of the mean, in the next step."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside add to ``grad`` on this worker only."""

    def finish(self) -> None:
        """All steps are made: block until the whole job has ended; JobEndedError if it failed."""

    def release(self) -> None:
        """Give the models and optimizers back to the program."""
