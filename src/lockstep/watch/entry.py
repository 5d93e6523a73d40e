"""How a watched job lets us in: a folder that torch finds an entry point in, and the variables that lead there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lockstep.watch import injected

RING_CALLS: Final = 256
"""Torch keeps 2,000 calls; a dump of these takes a tenth of a second, and so many are never needed."""
AUTOLOAD_VARIABLE: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PREFIX: Final = "lockstep-watch-"
_LONGEST: Final = 50
"""The address of a Unix socket has 107 bytes; a rank's file name takes up to 30 of them."""


@contextmanager
def watch_folder() -> Iterator[Path]:
    """A folder that only this user can enter, and that is gone afterwards, with all that is in it by then."""
    usual = tempfile.gettempdir()
    base = usual if len(usual) < _LONGEST else "/tmp"
    _remove_left(Path(base))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def entry_folder() -> Iterator[Path]:
    """The same, with what torch loads into a rank; ranks leave their files in it."""
    with watch_folder() as folder:
        shutil.copyfile(injected.__file__, folder / f"{injected.MODULE}.py")
        named = folder / f"{injected.MODULE}-1.dist-info"
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {injected.MODULE}\nVersion: 1\n")
        (named / "entry_points.txt").write_text(f"[torch.backends]\nlockstep_watch = {injected.MODULE}:start\n")
        yield folder


def _remove_left(base: Path) -> None:
    """What a watcher has left that was killed: it could not clean up."""
    for path in base.glob(f"{_PREFIX}*-*"):
        with suppress(OSError):
            pid = path.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and path.lstat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)


def entered(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables of a job that is to be watched. What its user has set stays."""
    found = {**environ, injected.FOLDER_VARIABLE: str(folder)}
    found["PYTHONPATH"] = os.pathsep.join(part for part in (str(folder), environ.get("PYTHONPATH", "")) if part)
    if not any(name in environ for name in (injected.RING_VARIABLE, injected.OLD_RING_VARIABLE)):
        found[injected.RING_VARIABLE] = str(RING_CALLS)
    return found


def kept_out(environ: Mapping[str, str]) -> str:
    """The variable with which this user keeps torch from loading us; empty if there is none."""
    return AUTOLOAD_VARIABLE if environ.get(AUTOLOAD_VARIABLE, "1") == "0" else ""
