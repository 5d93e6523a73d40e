"""Programs that the engines consist of: on this machine already, or from Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest

SBIN = "/usr/sbin:/sbin"


def find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=SBIN)


def install(programs: Sequence[str], packages: Sequence[str]) -> None:
    """See to it that they are here; the test fails, and says what is missing, where they cannot be had."""
    missing = [program for program in programs if find(program) is None]
    if not missing:
        return
    named = f"{', '.join(missing)} of {' and '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.fail(f"missing here: {named}; install them, or run this as root on a Debian machine", pytrace=False)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *packages)):
        done = subprocess.run(("apt-get", *words), env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.fail(f"missing here: {named}; apt-get {words[0]} failed: {done.stderr.strip()}", pytrace=False)
