"""Checks of this machine before anything is started: own address, port, folder, GPUs.

Only what this task itself needs is checked. A peer's name that does not resolve is not bad input but a missing task,
and is reported as one while the cluster forms.
"""

from __future__ import annotations

import errno
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.transports.control.addresses import (
    Address,
    AddressError,
    is_local_address,
    parse_address,
    resolve,
    who_listens,
)
from lockstep.transports.registry import machine_problems, stays_on_one_host

_NVIDIA_SMI_DEADLINE = 20.0


def task_problems(spec: ClusterSpec) -> list[str]:
    """What keeps this task from listening at its address; the spec must have no ``cluster_problems``."""
    return list(_protocol_problems(spec)) + (address_problems(spec) or port_problems(spec))


def address_problems(spec: ClusterSpec) -> list[str]:
    """Why this task cannot listen at its address on this machine."""
    return [] if spec.task is None else list(_address_problems(spec, spec.task))


def port_problems(spec: ClusterSpec) -> list[str]:
    """Why its port is not available; the address must belong to this machine."""
    return [] if spec.task is None else list(_port_problems(spec))


def protocol_problems(spec: ClusterSpec) -> list[str]:
    """Why the requested transport cannot carry the tensors of this cluster."""
    return list(_protocol_problems(spec))


def _protocol_problems(spec: ClusterSpec) -> Iterator[str]:
    yield from machine_problems(spec.protocol, spec.rdma)
    if not stays_on_one_host(spec.protocol):
        return
    for text in spec.ps_hosts + spec.worker_hosts:
        address = parse_address(text)
        # Only IP addresses: a name that does not resolve is a missing task, not bad input.
        if address.literal is not None and not is_local_address(address.host):
            yield (
                f"--server_protocol={spec.protocol} needs all tasks on one host, but {text} is on another; "
                "use --server_protocol=auto."
            )
            return


def _address_problems(spec: ClusterSpec, task: TaskId) -> Iterator[str]:
    listen = spec.listen_address()
    if listen.is_wildcard:
        return
    try:
        local = is_local_address(listen.host)
    except AddressError as error:
        remedy = "correct --bind" if spec.bind is not None else "correct the host list, or add --bind=ADDRESS"
        yield f"{task.short} cannot listen at {listen}: {str(error).removesuffix('.')}; {remedy}."
        return
    if local and spec.bind is None:
        yield from _loopback_name(spec, task, listen)
    elif not local and spec.bind is not None:
        yield f"--bind={spec.bind} is not an address of this machine; give one that is."
    elif not local:
        yield (
            f"{task.short} has the address {listen}, which is not this machine's; {_own_index(spec, task)}start it "
            "there, or add --bind=ADDRESS with the address to listen on here."
        )


def _loopback_name(spec: ClusterSpec, task: TaskId, listen: Address) -> Iterator[str]:
    """Many systems map their own name to 127.0.1.1: a task that listens there waits for other machines forever."""
    if listen.literal is not None or listen.host.lower() == "localhost":
        return
    addresses = resolve(listen.host)
    others = {address.host.lower() for address in map(parse_address, spec.ps_hosts + spec.worker_hosts)}
    if all(address.is_loopback for address in addresses) and others - {listen.host.lower()}:
        yield (
            f"{task.short} has the address {listen}, but that name resolves to {addresses[0]} on this machine, where "
            "no other machine can reach it; put its network address in the host lists, or add --bind=ADDRESS with it."
        )


def _own_index(spec: ClusterSpec, task: TaskId) -> str:
    """The likely mistake: the right list with the wrong index. Only looks at IP addresses: no name server is needed."""
    for index, text in enumerate(spec.hosts_of(task.role)):
        address = parse_address(text)
        if address.literal is not None and is_local_address(address.host):
            return f"--task_index={index} has {address}, which is; use that index here, or "
    return ""


def _port_problems(spec: ClusterSpec) -> Iterator[str]:
    listen = spec.listen_address()
    address = resolve(listen.host)[0]
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it, so that a port does not count as taken while connections of an earlier run are closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), listen.port))
            probe.listen(1)
        except OSError as error:
            yield _why_not_listening(listen, error)


def _why_not_listening(listen: Address, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = who_listens(listen.port)
        by_whom = f" by {holder}" if holder is not None else ""
        return f"port {listen.port} is already taken on this machine{by_whom}; end that process, or use another port."
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {listen.port}; use a port from 1024 up."
    return f"cannot listen at {listen} ({error.strerror or error}); use another address or port."


def folder_problems(flag: str, folder: str) -> list[str]:
    """Why a folder, which need not exist yet, cannot be written to; leaves nothing behind."""
    path = Path(folder)
    try:
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not existing.is_dir():
            return [f"--{flag}={folder} cannot be used: {existing} is not a folder; give one that can be written to."]
        with tempfile.TemporaryFile(dir=existing):
            return []
    except OSError as error:
        why = error.strerror or error
        return [f"--{flag}={folder} cannot be written to ({why}); give another folder, or correct its permissions."]


def count_gpus(visible: str | None) -> int:
    """GPUs that a program started here would see; ``visible`` is CUDA_VISIBLE_DEVICES. Does not import torch."""
    return visible_gpus(_gpus_present(), visible)


def visible_gpus(present: int, visible: str | None) -> int:
    """How many of ``present`` GPUs remain under CUDA_VISIBLE_DEVICES: counted up to the first that does not exist."""
    if visible is None:
        return present
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        # Anything but a number is the name of a GPU (GPU-..., MIG-...), which only the driver could check.
        number = re.fullmatch(r"[0-9]{1,6}", entry)
        exists = int(entry) < present if number else entry.startswith(("GPU-", "MIG-"))
        if not exists:
            break
        count += 1
    return count


def _gpus_present() -> int:
    """Asks the driver's own tool; without it, counts the device files."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_DEADLINE,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return sum(node.name.removeprefix("nvidia").isdecimal() for node in Path("/dev").glob("nvidia*"))
    return sum(line.startswith("GPU ") for line in listing.splitlines())
