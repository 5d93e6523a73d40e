"""Why ``grpc+verbs`` cannot be used on this machine: what was looked for, what was found, what to do."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.transports.base import TransportError
from lockstep.transports.verbs.devices import RdmaFacts, RdmaPort, look_for_rdma
from lockstep.transports.verbs.options import RdmaOptions

UNLIMITED: Final = -1
LEAST_LOCKED_BYTES: Final = 64 << 20
_CAP_IPC_LOCK: Final = 14
_PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")
_STATUS: Final = Path("/proc/self/status")


def device_problems(rdma: RdmaFacts, options: RdmaOptions) -> list[str]:
    """One sentence per problem; pure."""
    ports = list(_matching(rdma.ports, options))
    if not ports:
        return [_no_device(rdma, options)]
    active = [port for port in ports if port.active]
    if not active:
        states = ", ".join(f"{port.device} port {port.port} is {port.state or 'in an unknown state'}" for port in ports)
        return [
            f"no RDMA port is active ({states}); plug in the cable, start the subnet manager (InfiniBand) or bring "
            "up the network interface (RoCE)."
        ]
    return [*_files(rdma), *_gid(active[0], options), *_libraries(rdma, active[0])]


def _matching(ports: tuple[RdmaPort, ...], options: RdmaOptions) -> Iterator[RdmaPort]:
    for port in ports:
        if options.name in ("", port.device) and options.port in (None, port.port):
            yield port


def _no_device(rdma: RdmaFacts, options: RdmaOptions) -> str:
    if rdma.ports:
        there = ", ".join(map(str, rdma.ports))
        return f"--rdma_device={options.device} is not on this machine, which has {there}; give one of these."
    named = f" (--rdma_device={options.device})" if options.device else ""
    return (
        f"--server_protocol=grpc+verbs needs an RDMA device{named}, but /sys/class/infiniband shows none; load the "
        "driver of the network card, make the device visible in the container, or use --server_protocol=grpc."
    )


def _files(rdma: RdmaFacts) -> Iterator[str]:
    if not rdma.device_files:
        yield (
            "the RDMA device has no /dev/infiniband/uverbs file here; load ib_uverbs, or give the container the "
            "devices (--device=/dev/infiniband)."
        )


def _gid(port: RdmaPort, options: RdmaOptions) -> Iterator[str]:
    if not port.gids:
        yield f"{port.device} port {port.port} has no GID; give its network interface an IP address."
    elif options.gid_index is not None and port.gid_indices and options.gid_index not in port.gid_indices:
        there = ", ".join(f"{index} ({gid})" for index, gid in zip(port.gid_indices, port.gids, strict=True))
        yield (
            f"--rdma_gid_index={options.gid_index} is empty on {port.device} port {port.port}, which has {there}; "
            "give one of these, or leave it out."
        )


def _libraries(rdma: RdmaFacts, port: RdmaPort) -> Iterator[str]:
    if rdma.bundled_providers is None:
        yield "grpc+verbs needs NIXL, which is not installed in this Python; install it with 'pip install nixl-cu12'."
    elif needs_system_verbs(rdma, port):
        if port.provider not in rdma.providers:
            there = f"it has {', '.join(rdma.providers)}" if rdma.providers else "it has none at all"
            yield (
                f"libibverbs has no provider {port.provider} for {port.device} ({there}), and NIXL ships only "
                f"{', '.join(rdma.bundled_providers)}; install the provider package of your distribution "
                "(ibverbs-providers on Debian)."
            )
        if not rdma.system_verbs:
            yield (
                f"{port.device} needs the provider {port.provider}, which NIXL does not ship, and there is no "
                "libibverbs.so.1 on this machine; install it (libibverbs1 on Debian)."
            )


def needs_system_verbs(rdma: RdmaFacts, port: RdmaPort) -> bool:
    """NIXL's own libibverbs has no provider for this device, so the system's must replace it."""
    return rdma.bundled_providers is not None and port.provider not in rdma.bundled_providers


def locked_memory_problems(limit: int) -> Iterator[str]:
    """A network device accesses memory directly, so that memory must be locked."""
    if limit != UNLIMITED and limit < LEAST_LOCKED_BYTES:
        yield (
            f"a process may lock only {limit >> 10} KiB of memory here, but grpc+verbs registers at least "
            f"{LEAST_LOCKED_BYTES >> 20} MiB with the network device; run 'ulimit -l unlimited' (in a container: "
            "--ulimit memlock=-1)."
        )


def lockable_memory() -> int:
    """Bytes that this process may lock; -1 for no limit, also if the process may ignore it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY or _may_ignore_limits() else soft


def _may_ignore_limits() -> bool:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def gpudirect_problems(
    options: RdmaOptions, modules: Path = Path("/sys/module"), driver: Path = Path("/proc/driver/nvidia/version")
) -> Iterator[str]:
    """Why the kernel keeps network devices out of GPU memory. Only the first transfer shows whether it works."""
    if not options.gpudirect or any((modules / name).exists() for name in _PEER_MODULES):
        return
    try:
        version = driver.read_text()
    except OSError:
        yield "--rdma_gpudirect needs a GPU and NVIDIA's driver, which is not loaded here; leave out the flag."
        return
    if "Open Kernel Module" not in version:  # these offer dma-buf, which needs no further module
        yield (
            "--rdma_gpudirect needs the kernel module nvidia_peermem or NVIDIA's open kernel modules, and this machine "
            "has neither; run 'modprobe nvidia_peermem', or leave out the flag."
        )


def verbs_problems(options: RdmaOptions) -> list[str]:
    """All problems of this machine as it is now, except those of GPUs, which only some tasks need."""
    return [*device_problems(look_for_rdma(), options), *locked_memory_problems(lockable_memory())]


def usable_port(rdma: RdmaFacts, options: RdmaOptions) -> RdmaPort:
    """The port that is used; ``TransportError`` with everything that is wrong if there is none."""
    problems = [*device_problems(rdma, options), *locked_memory_problems(lockable_memory())]
    if problems:
        raise TransportError(" ".join(problems))
    return next(port for port in _matching(rdma.ports, options) if port.active)
