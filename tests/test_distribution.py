"""What is handed to people: its name, which nobody else has, and its licence."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from lockstep.version import __version__

ROOT = Path(__file__).parents[1]
SOMEBODY_ELSES = re.compile(rb"lockstep[-_.]" + rb"train\b", re.IGNORECASE)
"""The name on PyPI of a project that is not ours."""
PUBLISHED_APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt"""


def test_nothing_sends_people_to_a_project_that_is_not_ours() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout, so what is tracked is not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=20).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    assert ROOT / "README.md" in files
    assert [str(file) for file in files if SOMEBODY_ELSES.search(file.read_bytes() + str(file).encode())] == []


def test_the_licence_is_the_published_text() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == PUBLISHED_APACHE_2


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, built from a copy, because building leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("distribution")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('built')"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "built").glob("*.whl")
    return built


def test_the_wheel_has_our_name_and_carries_licence_and_notice(wheel: Path) -> None:
    assert wheel.name == f"lockstep_torch-{__version__}-py3-none-any.whl"
    inside = f"lockstep_torch-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        fields = message_from_bytes(archive.read(f"{inside}/METADATA"))
        assert archive.read(f"{inside}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert archive.read(f"{inside}/licenses/NOTICE") == (ROOT / "NOTICE").read_bytes()
        assert b"lockstep = lockstep.cli.main:main" in archive.read(f"{inside}/entry_points.txt")
        assert "lockstep/__init__.py" in archive.namelist()
    assert (fields["Name"], fields["License-Expression"]) == ("lockstep-torch", "Apache-2.0")
    own = re.findall(r"^lockstep-torch\[(.*?)\]", "\n".join(fields.get_all("Requires-Dist") or []), re.MULTILINE)
    assert own == ["data,plot"], "extras that take others along name this distribution"


def test_what_starts_processes_for_anyone_who_asks_is_not_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        suite = {name for name in archive.namelist() if name.startswith("lockstep/transports/conformance/")}
        assert not [name for name in archive.namelist() if name.startswith(("tests/", "conformance_hosts/"))]
    parts = ("__init__", "ending", "events", "moving", "node", "refusing", "stage", "suite")
    assert suite == {f"lockstep/transports/conformance/{part}.py" for part in parts}


def test_data_by_others_in_the_wheel_is_named_in_the_notice(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        ours = {".py", ".proto", ".binpb", ".typed", ".html", ".css", ".js", ".svg"}
        assert "lockstep/dashboard/static/index.html" in archive.namelist()
        data = [name for name in archive.namelist() if ".dist-info/" not in name and Path(name).suffix not in ours]
    digits, *written_here = data
    assert written_here == [f"lockstep/cli/monitoring/{name}" for name in ("lockstep-board.json", "lockstep.rules.yml")]
    notice = (ROOT / "NOTICE").read_text()
    assert digits == "lockstep/benchmark/data/digits.bin"
    assert digits in notice
    assert "CC BY 4.0" in notice
