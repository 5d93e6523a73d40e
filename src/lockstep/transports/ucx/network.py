"""Where UCX may listen. Left to itself it listens on every interface of the machine, at any port."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from lockstep.transports.control.addresses import interface_of, resolve
from lockstep.transports.control.ports import PortRange
from lockstep.transports.ucx.agent import PORTS, WITHOUT_SHARED_MEMORY, Settings

DEVICES: Final = "UCX_NET_DEVICES"
FAMILIES: Final = "UCX_TCP_AF_PRIO"
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")


def tcp_settings(host: str, ports: PortRange | None = None) -> Settings:
    """UCX settings for a task that listens at ``host``: its interface, beside any RDMA devices, which have no ports.

    What the user has set stays. 0.0.0.0 and ::, which the user has asked for, leave the choice to UCX.
    """
    interface = interface_of(host)
    chosen: dict[str, str] = {}
    if interface is not None:
        devices = (interface, *(f"{port.parents[1].name}:{port.name}" for port in _RDMA_DEVICES.glob("*/ports/*")))
        family = "inet6" if resolve(host)[0].version == 6 else "inet"
        chosen = {DEVICES: ",".join(devices), FAMILIES: family}
    if ports is not None:
        first, last = ports.longest_run()
        chosen[PORTS] = f"{first}-{last}"
    return WITHOUT_SHARED_MEMORY + tuple((name, value) for name, value in chosen.items() if name not in os.environ)
