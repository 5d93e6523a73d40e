"""What is compared, and with what; plain data, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lockstep.benchmark.settings.config import BenchConfig
from lockstep.runtime.startup.cluster import DEFAULT_PROTOCOL


class ContestantKind(StrEnum):
    """The kinds of contestants, by the name that ``--only`` takes."""

    LIMIT = "limit"
    SINGLE = "single"
    DDP = "ddp"
    LOCKSTEP = "lockstep"
    BESIDE = "beside"
    RANKS = "ranks"
    TF_CNN = "tf_cnn"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table. ``protocol`` applies to Lockstep only."""

    kind: ContestantKind
    protocol: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return _NAMES[self.kind].format(self.protocol)


_NAMES = {
    ContestantKind.LIMIT: "workers without communication (the limit)",
    ContestantKind.SINGLE: "one process, all threads",
    ContestantKind.DDP: "PyTorch DDP",
    ContestantKind.LOCKSTEP: "Lockstep, {}",
    ContestantKind.BESIDE: "Lockstep, {}, a server beside each worker",
    ContestantKind.RANKS: "Lockstep, {}, every rank trains",
    ContestantKind.TF_CNN: "tf_cnn_benchmarks, grpc",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The requested comparison. ``bench`` holds what all share: model, batch, steps, servers, workers, threads."""

    bench: BenchConfig
    bench_flags: tuple[str, ...]
    """The flags of ``bench`` as arguments for the programs to start, without ``--ps`` and ``--workers``."""
    contestants: tuple[Contestant, ...]
    servers: int
    workers: int
    threads: int
    """Per worker; a single process gets those of all workers."""
    repeats: int
    run_timeout: float
    """Seconds that one run of one contestant may take."""
    tf_cnn: str = ""
    tf_python: str = ""
    on_hosts: bool = False
    """Every server and every worker has a host of its own (``run_hosts.py``)."""


def all_contestants(protocols: Sequence[str], *, with_tf_cnn: bool, on_hosts: bool) -> tuple[Contestant, ...]:
    """All contestants, in the order of the table. ``on_hosts``: also those that are about where tasks are."""
    others = [ContestantKind.LIMIT, *([] if on_hosts else [ContestantKind.SINGLE]), ContestantKind.DDP]
    ours = [Contestant(ContestantKind.LOCKSTEP, protocol) for protocol in protocols]
    if on_hosts:
        ours += [Contestant(kind, DEFAULT_PROTOCOL) for kind in (ContestantKind.BESIDE, ContestantKind.RANKS)]
    theirs = [Contestant(ContestantKind.TF_CNN)] if with_tf_cnn else []
    return (*(Contestant(kind) for kind in others), *ours, *theirs)
