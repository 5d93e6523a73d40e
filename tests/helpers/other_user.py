"""Another user of the same machine, who used the temporary directory before us."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
SOMEBODY = 12345
"""A user without privileges, for checks that root would pass."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")


@contextmanager
def everybodys_folder() -> Iterator[Path]:
    """A temporary directory like /tmp, which every user can reach; pytest's own is closed to others."""
    outer = Path(tempfile.mkdtemp(prefix="lockstep-test-"))
    try:
        outer.chmod(0o755)
        shared = outer / "tmp"
        shared.mkdir()
        shared.chmod(0o1777)
        yield shared
    finally:
        shutil.rmtree(outer)


_AS_NOBODY = (
    "import os, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); os.umask(0); os.execv('/bin/sh', sys.argv[1:])"
)


def nobody_does(script: str, folder: Path) -> None:
    """Run a shell script as the user nobody, in this folder."""
    # Not subprocess's user=: it makes Python fork, and gRPC's fork handlers may crash the child if gRPC runs.
    command = [sys.executable, "-I", "-S", "-c", _AS_NOBODY.format(NOBODY), "sh", "-euc", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0, f"{script}: {done.stderr or done.returncode}"


@contextmanager
def being(user: int) -> Iterator[None]:
    """Let this process act as another user for a while: with that user's rights, creating files of that user."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
