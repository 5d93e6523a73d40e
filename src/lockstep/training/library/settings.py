"""What all tasks of a library job must agree on, servers included. Torch-free: a server is started without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.protocol.messages import Setting
from lockstep.runtime.cluster import ClusterSpec
from lockstep.training.config import torch_version
from lockstep.version import __version__

REDUCTIONS = ("mean", "sum")
ON_NAN = ("report", "skip", "stop")
"""What may become of a step in which a gradient has a NaN or an infinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How the gradients of all workers become one step."""

    synchronous: bool = True
    reduction: str = "mean"
    replicas_to_aggregate: int | None = None

    def aggregate(self, workers: int) -> int | None:
        """None where every worker contributes to every step."""
        return None if self.replicas_to_aggregate in (None, workers) else self.replicas_to_aggregate


def exchange_problems(exchange: Exchange, workers: int) -> Iterator[str]:
    """What is wrong with this choice, a sentence each."""
    count = exchange.replicas_to_aggregate
    if exchange.reduction not in REDUCTIONS:
        yield f"reduction={exchange.reduction!r} is not known; use one of: {', '.join(REDUCTIONS)}."
    if count is not None and not 1 <= count <= workers:
        yield (
            f"replicas_to_aggregate={count} cannot be had from {workers} workers; give a number from 1 to {workers}."
        )
    if count is not None and not exchange.synchronous:
        yield "replicas_to_aggregate counts the workers of a synchronous step; leave it out without synchronisation."
    if exchange.reduction == "sum" and not exchange.synchronous:
        yield "without synchronisation each gradient is applied by itself; leave out reduction='sum'."


def library_settings(cluster: ClusterSpec, exchange: Exchange) -> tuple[Setting, ...]:
    """Compared when a task joins; the first that differs is named."""
    shape = cluster.shape
    values: dict[str, object] = {
        "lockstep version": __version__,
        "torch version": torch_version(),
        "program": "a program of one's own (lockstep.join, lockstep ps)",
        "number of servers": shape.servers,
        "number of workers": shape.workers,
        "server_protocol": cluster.protocol,
        "cross_replica_sync": exchange.synchronous,
        "reduction": exchange.reduction,
        "replicas_to_aggregate": exchange.replicas_to_aggregate or shape.workers,
    }
    return tuple(Setting(name, str(value)) for name, value in values.items())
