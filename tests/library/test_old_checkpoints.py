"""What an earlier version saved is read by this one: folders written by releases, kept as they were.

A release adds its own beside them: ``python -m library.test_old_checkpoints VERSION`` in ``tests/``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from library.test_resuming import Run
from lockstep.cli.main import main
from lockstep.runtime.checkpoint.folder import FORMAT, CheckpointFolder, verify
from lockstep.version import __version__

DATA = Path(__file__).with_name("data")
RELEASES = sorted(path.name.removeprefix("checkpoint-") for path in DATA.glob("checkpoint-*"))
BEFORE, AFTER = (3,), (3, 3)


@pytest.fixture(params=RELEASES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder as that release left it, three steps into the program of ``Run``."""
    shutil.copytree(DATA / f"checkpoint-{request.param}", tmp_path / "run")
    return tmp_path / "run"


def test_this_version_has_left_one() -> None:
    assert __version__ in RELEASES


def test_every_byte_is_verified_and_it_can_be_exported(saved: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert main(["checkpoint", "export", str(saved), str(tmp_path / "out.safetensors")]) == 0


def test_a_job_resumes_from_it_as_if_it_had_never_stopped(saved: Path, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", AFTER)()
    resumed = Run(saved, AFTER)()
    assert resumed.seen == {0: [3, 4, 5], 1: [3, 4, 5]}
    for worker, model in whole.models.items():
        for name, tensor in model.items():
            torch.testing.assert_close(resumed.models[worker][name], tensor, msg=f"{name} of worker {worker}")
    assert resumed.rates == whole.rates


def test_fields_that_a_newer_version_adds_under_the_same_format_are_passed_over(saved: Path) -> None:
    (path,) = CheckpointFolder(saved).complete()
    _change_manifest(path, addition={"of a newer version": [1, 2]})
    assert verify(path).version == 3


def test_another_format_is_left_alone_and_said_to_be_one(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = CheckpointFolder(saved).complete()
    _change_manifest(path, format=FORMAT + 1)
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert f"has format {FORMAT + 1}, but this version reads format {FORMAT}" in capsys.readouterr().out
    assert path.exists(), "it is not taken for damaged"


def _change_manifest(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    fields = json.loads(file.read_bytes().partition(b"\n")[2]) | changes
    text = json.dumps(fields).encode()
    file.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


if __name__ == "__main__":
    Run(DATA / f"checkpoint-{sys.argv[1]}", BEFORE)()
