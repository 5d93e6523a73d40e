"""What torch.distributed listens with: its store, gloo and NCCL. Each would listen on every interface by default.

None of them can tell who connects: they belong on a private network (docs/security.md).
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from lockstep.runtime.listening import address_here, interface_here
from lockstep.training.torch_private import c10d

GLOO: Final = "GLOO_SOCKET_IFNAME"
NCCL: Final = "NCCL_SOCKET_IFNAME"


def serve_store(host: str, port: int, size: int, seconds: float) -> c10d.TCPStore:
    """The store of ``size`` processes, at this address only. OSError if the port (0: any) is taken."""
    where = address_here(host)
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    listener = socket.create_server((where, port), family=family, backlog=max(128, size))
    port = int(listener.getsockname()[1])
    return c10d.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=_has_libuv(),
    )


def reach_store(host: str, port: int, size: int | None, seconds: float) -> c10d.TCPStore:
    """The store that another process serves; torch's own errors if it cannot be reached in time."""
    limit = timedelta(seconds=seconds)
    return c10d.TCPStore(host, port, size, timeout=limit, wait_for_workers=False, use_libuv=_has_libuv())


def _has_libuv() -> bool:
    """Torch can be built without libuv, as Debian's is. It then asks for this variable, and a store made by hand does
    not read it."""
    return os.environ.get("USE_LIBUV", "1") == "1"


def gloo_device(host: str) -> Any:
    """Where gloo listens and connects from: at this address, unless the user has named an interface."""
    named = os.environ.get(GLOO, "")
    if named:
        return dist.ProcessGroupGloo.create_device(interface=named.partition(",")[0])
    return dist.ProcessGroupGloo.create_device(hostname=host)


def stay_on_interface(host: str) -> None:
    """Have NCCL use the interface of this address, unless the user has named one. Before its first group is made."""
    interface = interface_here(host)
    if interface is not None:
        os.environ.setdefault(NCCL, f"={interface}")
