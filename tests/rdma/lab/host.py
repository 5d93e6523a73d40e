"""What the lab needs of this machine: root, the emulator and the tools that build its hosts."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "cpio": "cpio",
    "mke2fs": "e2fsprogs",
}
"""Programs, and the Debian packages they are in."""

GUEST_PYTHON: Final = {"bookworm": (3, 11), "trixie": (3, 13)}
KERNELS: Final = ("linux-image-6.12-amd64", "linux-image-amd64")
_SECONDS: Final = 400.0


@dataclass(frozen=True, slots=True)
class Source:
    """One line of this machine's list of Debian packages."""

    where: str
    suite: str
    component: str

    def line(self) -> str:
        return f"deb {self.where} {self.suite} {self.component}"


class NoLabError(Exception):
    """Why there can be no lab on this machine."""


def run(*command: str, seconds: float = _SECONDS, cwd: Path | None = None) -> str:
    """The output of a command; NoLabError with its last words where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=cwd, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLabError(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-400:]
        raise NoLabError(f"'{' '.join(command)[:100]}' ended with {done.returncode}: {words}")
    return done.stdout


def debian_sources() -> list[Source]:
    """The Debian archives that this machine's apt knows."""
    told = run("apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)", _PACKAGES)
    rows = [line.split("|") for line in told.splitlines()]
    found = [Source(where, suite, part) for origin, where, suite, part in rows if origin == "Debian" and part == "main"]
    return list(dict.fromkeys(found))


_PACKAGES: Final = "Created-By: Packages"


def prepare() -> str:
    """Make this machine ready, installing what is missing; the Debian suite of the lab. NoLabError says why not."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise NoLabError("the lab's hosts are Linux on x86_64, and this machine is not")
    if os.geteuid() != 0:
        raise NoLabError("only root can build the lab's disk image; run it as root")
    if shutil.which("apt-get") is None:
        raise NoLabError("the lab's hosts are made of Debian packages, and there is no apt-get here")
    if not debian_sources():
        run("apt-get", "update")
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        run("apt-get", "update")
        run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "--no-install-recommends", *missing)
    return _suite()


def _suite() -> str:
    sources = debian_sources()
    if not sources:
        raise NoLabError("apt knows no Debian archive here")
    suite = sources[0].suite
    expected = GUEST_PYTHON.get(suite)
    if expected is None:
        raise NoLabError(f"the lab knows Debian {' and '.join(GUEST_PYTHON)}, and apt has {suite}")
    if sys.version_info[:2] != expected:
        raise NoLabError(
            f"the lab's hosts share this environment's packages, so it must have Python {expected[0]}.{expected[1]} as "
            f"Debian {suite} has, and not {sys.version_info.major}.{sys.version_info.minor}"
        )
    return suite


def folder() -> Path:
    """Where kernel, image and logs are kept between runs."""
    given = os.environ.get("LOCKSTEP_LAB")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lockstep-lab"
