"""What torch.distributed listens with stays at the address that was listed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from helpers.ports import free_port
from lockstep.training.ranks import listening
from lockstep.transports.control.addresses import interface_of

PROGRAM = """
import os, sys
import torch._C._distributed_c10d as c10d, torch.distributed as dist
from lockstep.training.ranks.listening import gloo_device, serve_store
from lockstep.runtime.listening import listening_sockets
store = serve_store("127.0.0.1", int(sys.argv[1]), 1, 30.0)
store.set("a", "b")
assert store.get("a") == b"b"
options = dist.ProcessGroupGloo._Options()
options._devices = [gloo_device("127.0.0.1")]
group = dist.ProcessGroupGloo(c10d.PrefixStore("gloo", store), 0, 1, options)
print(*(one for one in listening_sockets([os.getpid()])))
"""
CONTAINER = 'ip link set lo up && echo "4700 4799" > /proc/sys/net/ipv4/ip_local_port_range && exec "$@"'


def listens(port: int, *before: str, program: str = PROGRAM, **environment: str) -> list[str]:
    command = [*before, sys.executable, "-c", program, str(port)]
    everything = {**os.environ, **environment}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True, env=everything)
    return ran.stdout.split()


def test_the_store_and_gloo_listen_at_the_listed_address_only() -> None:
    port = free_port()
    found = listens(port)
    assert len(found) == 2
    assert f"127.0.0.1:{port}" in found
    assert all(place.startswith("127.0.0.1:") for place in found)


@pytest.mark.slow
def test_gloo_uses_the_interface_that_the_user_has_named() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert len(listens(free_port(), GLOO_SOCKET_IFNAME=loopback)) == 2
    with pytest.raises(subprocess.CalledProcessError):
        listens(free_port(), GLOO_SOCKET_IFNAME="no-such-interface")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_the_port_of_gloo_is_in_the_range_of_the_kernel() -> None:
    found = listens(4799, "unshare", "--net", "sh", "-c", CONTAINER, "sh")
    ports = [int(place.rpartition(":")[2]) for place in found]
    assert len(ports) == 2
    assert all(4700 <= port <= 4799 for port in ports)


def test_nccl_stays_on_the_interface_unless_the_user_has_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(listening.NCCL, "ib0")
    listening.stay_on_interface("127.0.0.1")
    assert os.environ[listening.NCCL] == "ib0"
    monkeypatch.delenv(listening.NCCL)
    listening.stay_on_interface("127.0.0.1")
    assert os.environ[listening.NCCL] == f"={interface_of('127.0.0.1')}"
    monkeypatch.delenv(listening.NCCL)


@pytest.mark.slow
def test_a_torch_without_libuv_serves_the_store_too() -> None:
    """Debian's: there torch asks for USE_LIBUV=0, and leaves it to the caller to heed it."""
    program = PROGRAM.replace("print(", "assert not store.libuvBackend\nprint(")
    port = free_port()
    assert f"127.0.0.1:{port}" in listens(port, program=program, USE_LIBUV="0")
