"""Looks for RDMA devices: their ports, addresses (GIDs), and the libraries that drive them. Reads files only."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.transports.verbs.options import NIXL_MODULES

VERBS_LIBRARY: Final = "libibverbs.so.1"
_MOST_GIDS: Final = 16
_PROVIDER_FOLDERS: Final = (
    Path("/usr/lib/x86_64-linux-gnu/libibverbs"),
    Path("/usr/lib/aarch64-linux-gnu/libibverbs"),
    Path("/usr/lib64/libibverbs"),
    Path("/usr/lib/libibverbs"),
)
_PROVIDER_OF_DRIVER: Final = {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "bnxt_en": "bnxt_re", "ice": "irdma"}


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one RDMA device."""

    device: str
    port: int
    state: str
    link_layer: str
    provider: str
    gids: tuple[str, ...] = ()
    gid_indices: tuple[int, ...] = ()
    """The index of each GID in the port's table."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """``ports`` of all devices; ``device_files``: /dev/infiniband/uverbs*; ``providers``: installed libraries."""

    ports: tuple[RdmaPort, ...] = ()
    device_files: int = 0
    providers: tuple[str, ...] = ()
    bundled_providers: tuple[str, ...] | None = None
    """Those that the installed NIXL ships; None if it is not installed."""
    system_verbs: str = ""
    """Where the system's own libibverbs.so.1 is; empty if there is none."""


@dataclass(frozen=True, slots=True)
class RdmaRoots:
    """Where to look."""

    devices: Path = Path("/sys/class/infiniband")
    device_files: Path = Path("/dev/infiniband")
    provider_folders: tuple[Path, ...] = _PROVIDER_FOLDERS
    packages: Path | None = None
    """The folder of Python packages; None: that of this Python."""


def look_for_rdma(roots: RdmaRoots | None = None) -> RdmaFacts:
    """Reads files only."""
    roots = roots or RdmaRoots()
    devices = sorted(_listed(roots.devices))
    return RdmaFacts(
        ports=tuple(port for device in devices for port in _ports(device)),
        device_files=sum(node.name.startswith("uverbs") for node in _listed(roots.device_files)),
        providers=_providers(roots.provider_folders),
        bundled_providers=_bundled(roots.packages),
        system_verbs=next((str(path) for path in _system_libraries(roots, VERBS_LIBRARY)), ""),
    )


def _system_libraries(roots: RdmaRoots, name: str) -> list[Path]:
    """A library is next to the folder of its providers."""
    places = (folder.parent / name for folder in roots.provider_folders)
    return [place for place in places if place.exists()]


def system_library(name: str) -> Path | None:
    """A library of this machine's own RDMA packages."""
    return next(iter(_system_libraries(RdmaRoots(), name)), None)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _ports(device: Path) -> list[RdmaPort]:
    numbered = sorted(port for port in _listed(device / "ports") if port.name.isdecimal())
    provider = _provider_of(device)
    return [
        RdmaPort(
            device=device.name,
            port=int(port.name),
            state=_read(port / "state").rpartition(" ")[2],
            link_layer=_read(port / "link_layer"),
            provider=provider,
            gids=tuple(gids.values()),
            gid_indices=tuple(gids),
        )
        for port, gids in ((port, _gids(port)) for port in numbered)
    ]


def _gids(port: Path) -> dict[int, str]:
    """The addresses that are set, by index; an unset entry is all zeros after its prefix."""
    entries = sorted(int(entry.name) for entry in _listed(port / "gids") if entry.name.isdecimal())
    texts = ((index, _read(port / "gids" / str(index))) for index in entries[:_MOST_GIDS])
    return {index: text for index, text in texts if text and set(text.replace("fe80", "", 1)) - set("0:")}


def _provider_of(device: Path) -> str:
    """Which library of libibverbs drives it: rxe and siw have no hardware, others name their driver."""
    driver = device / "device" / "driver"
    if driver.exists():
        name = driver.resolve().name
        return _PROVIDER_OF_DRIVER.get(name, name)
    return "siw" if device.name.startswith("siw") else "rxe"


def _providers(folders: tuple[Path, ...]) -> tuple[str, ...]:
    """``libmlx5-rdmav34.so`` is the provider mlx5."""
    names = (file.name for folder in folders for file in _listed(folder))
    return tuple(sorted({name[3:].partition("-rdmav")[0] for name in names if "-rdmav" in name}))


def _bundled(packages: Path | None) -> tuple[str, ...] | None:
    packages = packages or nixl_packages()
    listed = [] if packages is None else _listed(packages)
    brought = [folder for folder in listed if folder.name.startswith("nixl") and folder.suffix == ".libs"]
    if not brought:
        return None
    names = (file.name for folder in brought for file in _listed(folder))
    return tuple(sorted({name[3:].partition("-")[0] for name in names if name.startswith("libmlx")}))


def nixl_packages() -> Path | None:
    """The folder in which NIXL is installed; None if it is not. Does not load it."""
    for module in NIXL_MODULES:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            # Resolved: it may have been loaded from a folder of links (``provider.py``).
            return Path(spec.origin).resolve().parents[1]
    return None
