"""Looks at this machine: limits, memory, disks, GPUs, torch. All of it is read from files or asked with a deadline.

``Roots`` says where the kernel's files are, so that a test can provide others.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.doctor.facts import DataFolder
from lockstep.runtime.cores import CGROUP, OWN_CGROUP, cgroup_folders, read_if_there, usable_cores
from lockstep.runtime.startup.preflight import visible_gpus
from lockstep.transports.verbs.checks import lockable_memory

_NVIDIA_SECONDS: Final = 3.0
_MOST_FILES: Final = 20_000
UNLIMITED: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What this machine grants. -1 means no limit, None means unknown."""

    open_files: int = UNLIMITED
    locked_memory: int = UNLIMITED
    shm_free: int | None = None
    memory_limit: int = UNLIMITED
    memory_available: int | None = None
    cpus: float = 1.0
    tasks_left: int = UNLIMITED
    gpus_present: int = 0
    gpus_visible: int = 0
    driver_cuda: str = ""
    torch: str = ""
    """The version of the installed torch; empty if there is none."""
    torch_cuda: str = ""
    """The CUDA version that torch was built for; empty for a build without CUDA."""
    disk_free: int | None = None


@dataclass(frozen=True, slots=True)
class Roots:
    """Where to look."""

    cgroup: Path = CGROUP
    own_cgroup: Path = OWN_CGROUP
    shm: Path = Path("/dev/shm")
    meminfo: Path = Path("/proc/meminfo")


def look_at_machine(
    visible: str | None, train_dir: str | None, roots: Roots | None = None, *, quick: bool = False
) -> MachineFacts:
    """``visible`` is CUDA_VISIBLE_DEVICES. Takes up to three seconds if the GPU driver is slow, else no time.

    ``quick``: leave out GPUs and torch.
    """
    roots = roots or Roots()
    present, driver = (0, "") if quick else _gpus()
    version, cuda = ("", "") if quick else _torch()
    groups = cgroup_folders(roots.cgroup, roots.own_cgroup)
    return MachineFacts(
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=lockable_memory(),
        shm_free=_free(roots.shm),
        memory_limit=_least(groups, "memory.max"),
        memory_available=_available(roots.meminfo),
        cpus=usable_cores(groups),
        tasks_left=_tasks_left(groups),
        gpus_present=present,
        gpus_visible=visible_gpus(present, visible),
        driver_cuda=driver,
        torch=version,
        torch_cuda=cuda,
        disk_free=None if train_dir is None else _free(_existing(Path(train_dir))),
    )


def _limit(which: int) -> int:
    soft, _hard = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _existing(path: Path) -> Path:
    return next((place for place in (path, *path.absolute().parents) if place.exists()), path)


def _least(groups: list[Path], name: str) -> int:
    limits = [int(text) for group in groups if (text := read_if_there(group / name).strip()).isdecimal()]
    return min(limits, default=UNLIMITED)


def _tasks_left(groups: list[Path]) -> int:
    left = [
        int(limit) - int(read_if_there(group / "pids.current").strip() or 0)
        for group in groups
        if (limit := read_if_there(group / "pids.max").strip()).isdecimal()
    ]
    return min(left, default=UNLIMITED)


def _available(meminfo: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_if_there(meminfo), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _gpus() -> tuple[int, str]:
    """How many GPUs there are, and the newest CUDA version that their driver supports."""
    try:
        shown = subprocess.run(
            ["nvidia-smi", "-q"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return sum(node.name.removeprefix("nvidia").isdecimal() for node in Path("/dev").glob("nvidia*")), ""
    return read_nvidia_smi(shown)


def read_nvidia_smi(shown: str) -> tuple[int, str]:
    """The number of GPUs and the CUDA version, from the output of ``nvidia-smi -q``."""
    count = re.search(r"^Attached GPUs\s*:\s*(\d+)", shown, re.MULTILINE)
    cuda = re.search(r"^CUDA Version\s*:\s*([0-9.]+)", shown, re.MULTILINE)
    return int(count[1]) if count else 0, cuda[1] if cuda else ""


def _torch() -> tuple[str, str]:
    """Version and CUDA version of torch, from its package metadata: importing it would take seconds."""
    import importlib.metadata  # here, because starting a task does not need it

    try:
        version = importlib.metadata.version("torch")
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return "", ""
    return version, cuda_of_torch(version, wanted)


def cuda_of_torch(version: str, wanted: list[str]) -> str:
    """``12.6`` for a build for CUDA 12.6; empty for one without CUDA, or if it cannot be told."""
    local = re.search(r"\+cu(\d+)(\d)$", version)
    if local:
        return f"{local[1]}.{local[2]}"
    if "+" in version:
        return ""
    named = r"(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit)(?:\[[^]]*\])?\s*==\s*(\d+\.\d+)"
    runtime = (re.match(named, requirement) for requirement in wanted)
    return next((found[1] for found in runtime if found), "")


def look_at_data(path: str) -> DataFolder:
    """A digest of names and sizes, so that the folders of two hosts can be compared; the files are not read."""
    folder = Path(path)
    digest = hashlib.sha256()
    try:
        entries = sorted(os.listdir(folder))
        for name in entries[:_MOST_FILES]:
            path_of_it = folder / name
            nbytes = path_of_it.stat().st_size if path_of_it.is_file() else -1
            digest.update(f"{name}\0{nbytes}\n".encode(errors="replace"))
    except OSError as error:
        return DataFolder(path, problem=error.strerror or str(error))
    return DataFolder(path, len(entries), digest.hexdigest()[:16])
