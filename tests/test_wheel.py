"""The wheel as a user has it: built as the page about installing says, in an environment with nothing of ours, where it
runs the demo. Needs a package index. ``make wheel``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from docs.fences import ROOT, sample
from lockstep.version import __version__

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]

DEMO = "bench --ps=1 --workers=2 --device=cpu --model=lenet --batch_size=16 --num_batches=20"


def run(*command: str | Path, folder: Path, path: Path) -> str:
    """In an environment of which only programs in ``path``, and those of the system, are known."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HOME", "LANG", "SSL_"))}
    environment = {**kept, "PATH": f"{path}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def fresh_environment(folder: Path) -> Path:
    """Its folder of programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the tree now, whether or not it is committed."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, timeout=60,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_the_wheel_of_a_build_installs_and_runs_the_demo(clone: Path, tmp_path: Path) -> None:
    build = fresh_environment(tmp_path / "build")
    commands = sample("install.md", "pip install build").replace(
        "install build", "install --quiet -c constraints.txt build"
    )
    run("bash", "-euo", "pipefail", "-c", commands, folder=clone, path=build)
    (wheel,) = (clone / "dist").glob("*.whl")
    assert wheel.name == f"lockstep_torch-{__version__}-py3-none-any.whl"
    assert wheel.name in sample("install.md", "pip install 'dist/")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert folders == {"lockstep", f"lockstep_torch-{__version__}.dist-info"}

    user = fresh_environment(tmp_path / "user")
    pins = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for what in (pins[0], wheel):
        run(
            user / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
            what,
            folder=tmp_path,
            path=user,
        )
    run(user / "python", "-m", "pip", "check", folder=tmp_path, path=user)
    version = run("lockstep", "--version", folder=tmp_path, path=user)
    assert version.startswith(f"Lockstep {__version__} with torch {pins[0].removeprefix('torch==')}")
    assert f"no NIXL, Python {sys.version.split()[0]}" in version
    demo = run("lockstep", *DEMO.split(), folder=tmp_path, path=user)
    assert re.search(r"^total images/sec: \d", demo, re.MULTILINE), demo
    assert run("lockstep", "drill", "worker-killed", folder=tmp_path, path=user).startswith("worker-killed")
