"""Where this process runs: in a pod, in a step of Slurm, in an actor of Ray; and what its network is like there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from lockstep.runtime.cores import read_if_there
from lockstep.runtime.startup.own_name import POD_VARIABLE, machine_address
from lockstep.transports.control.addresses import (
    AddressError,
    interface_addresses,
    interface_of,
    resolve,
)

CLUSTER_NAME: Final = "kubernetes.default.svc"
"""A name that every cluster's DNS knows."""
_NAME_SECONDS: Final = 1.5
_NETWORKS: Final = Path("/sys/class/net")


class ClusterEngine(StrEnum):
    """What has started this process; the value is for programs."""

    NONE = ""
    POD = "kubernetes"
    SLURM = "slurm"
    RAY = "ray"

    @property
    def words(self) -> str:
        return {
            ClusterEngine.POD: "a Kubernetes pod",
            ClusterEngine.SLURM: "a Slurm step",
            ClusterEngine.RAY: "a Ray actor",
        }.get(self, "")


@dataclass(frozen=True, slots=True)
class Place:
    """``cluster_dns``: whether the engine's own name resolves; None: not asked. ``mtu`` is 0 if it is not known."""

    engine: ClusterEngine = ClusterEngine.NONE
    cluster_dns: bool | None = None
    addresses: tuple[str, ...] = ()
    """Of this machine, or pod."""
    mtu: int = 0


def engine_of(environ: Mapping[str, str]) -> ClusterEngine:
    """By the variables that each engine sets. Innermost first: Ray runs in pods and in jobs of Slurm, too."""
    if environ.get("RAY_RAYLET_PID") or environ.get("RAY_JOB_ID"):
        return ClusterEngine.RAY
    if environ.get("SLURM_STEP_ID") or environ.get("SLURM_PROCID"):
        return ClusterEngine.SLURM
    return ClusterEngine.POD if environ.get(POD_VARIABLE) else ClusterEngine.NONE


def look_at_place(engine: ClusterEngine, networks: Path = _NETWORKS) -> Place:
    """Takes up to 1.5 s in a pod whose DNS does not answer, else no time."""
    return Place(
        engine,
        _resolves(CLUSTER_NAME) if engine is ClusterEngine.POD else None,
        tuple(sorted(map(str, interface_addresses()))),
        _mtu(networks),
    )


def _resolves(name: str) -> bool:
    try:
        return bool(resolve(name, _NAME_SECONDS))
    except AddressError:
        return False


def _mtu(networks: Path) -> int:
    """Of the interface with which this machine appears to others."""
    try:
        interface = interface_of(machine_address())
    except AddressError:
        return 0
    text = read_if_there(networks / (interface or "-") / "mtu").strip()
    return int(text) if text.isdecimal() else 0
