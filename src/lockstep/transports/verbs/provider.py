"""NIXL with the system's libibverbs in place of the one that it ships.

NIXL's libibverbs has only the provider mlx5, and cannot load those of the system, which must match its exact version.
For other devices we build a folder of links to everything that belongs to NIXL, in which the names of its libibverbs
and libmlx5 point to the system's libraries. NIXL's libraries look for one another in their own folder, so importing
NIXL from that folder is enough: the installation is not touched, and no process has to be restarted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from lockstep.private_files import own_folder, user_folder
from lockstep.transports.base import TransportError
from lockstep.transports.verbs.devices import VERBS_LIBRARY, nixl_packages, system_library

_REPLACED: Final = (("libibverbs-", VERBS_LIBRARY), ("libmlx5-", "libmlx5.so.1"))
"""Beginnings of the names in NIXL's folder, and the system's libraries. A library that the system lacks is left out."""

_MARK: Final = "complete"


def nixl_with_system_verbs() -> Path:
    """The folder to import NIXL from; built once per user, NIXL and libibverbs, and then reused."""
    packages, verbs = nixl_packages(), system_library(VERBS_LIBRARY)
    if packages is None or verbs is None:
        raise TransportError("the system's libibverbs cannot replace NIXL's: one of the two is not installed")
    version = f"{packages.resolve()}|{verbs.resolve()}|{_stamp(packages)}"
    digest = hashlib.sha256(version.encode()).hexdigest()[:12]
    try:
        # Code is loaded from there: no other user may be able to write to it.
        with user_folder() as (base, parent):
            folder = base / f"nixl-{digest}"
            if not (folder / _MARK).exists():
                _build(packages, folder)
            with own_folder(folder.name, parent):
                return folder
    except OSError as error:
        reason = f"NIXL's libraries cannot be linked in {tempfile.gettempdir()}: {error.strerror or error}"
        raise TransportError(f"{reason}; set TMPDIR to another folder") from error


def _stamp(packages: Path) -> str:
    """Changes when NIXL is reinstalled."""
    return ",".join(str(part.stat().st_mtime_ns) for part in _parts(packages))


def _parts(packages: Path) -> list[Path]:
    """NIXL's module, its libraries, and those that its build keeps in separate folders."""
    found = [entry for entry in packages.iterdir() if entry.is_dir() and entry.name.lstrip(".").startswith("nixl_cu")]
    return sorted(entry for entry in found if not entry.name.endswith((".dist-info", ".scripts")))


def _build(packages: Path, folder: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for part in _parts(packages):
            for place, names, files in os.walk(part):
                names[:] = [name for name in names if name != "__pycache__"]
                inside = draft / Path(place).relative_to(packages)
                inside.mkdir(parents=True, exist_ok=True)
                for name in files:
                    _link(inside / name, Path(place) / name)
        (draft / _MARK).touch()
        draft.rename(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not (folder / _MARK).exists():  # otherwise another process was faster
            raise TransportError(f"the folder {folder} for NIXL's libraries cannot be created: {error}") from error


def _link(link: Path, target: Path) -> None:
    for beginning, library in _REPLACED:
        if link.name.startswith(beginning):
            replacement = system_library(library)
            if replacement is not None:
                link.symlink_to(replacement)
            return
    link.symlink_to(target)
