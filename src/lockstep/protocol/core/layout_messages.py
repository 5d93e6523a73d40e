"""The model, as tasks compare it before they train. ``messages.py`` has all messages."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.ids import INITIAL_STEP, Step
from lockstep.protocol.core.joining_messages import Setting


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter of the model, as the plan needs it."""

    name: str
    elements: int
    dtype: str
    group: int


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One parameter group: the optimizer's class name and its plain settings, as JSON."""

    kind: str
    options: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Chief to each server, and each worker to each server: the parameter list and the plan's hash.

    The hashes are compared; the lists are there to name the first difference. ``untrained`` has a digest of each
    tensor of the model that no optimizer changes (frozen parameters, buffers): the servers never send those, so they
    must be equal from the start. ``start`` and ``checkpoint`` are those of the sender's ``View``.
    """

    plan_hash: str
    bucket_bytes: int
    parameters: tuple[ParameterEntry, ...]
    optimizers: tuple[OptimizerEntry, ...]
    untrained: tuple[Setting, ...] = ()
    start: Step = INITIAL_STEP
    checkpoint: str = ""
