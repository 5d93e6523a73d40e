"""Programs that only a make target needs, in an environment of their own that is gone afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def installed(requirement: str) -> Iterator[Path]:
    """The folder of programs of an environment with one package."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / "bin"
        done = subprocess.run(
            [programs / "python", "-m", "pip", "install", "--quiet", requirement], check=False, timeout=600
        )
        if done.returncode:
            sys.exit(f"{requirement} could not be installed; this needs a package index.")
        yield programs
