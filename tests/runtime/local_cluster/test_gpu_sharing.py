"""NVIDIA's MPS around a cluster. A program in the daemon's place shows how it is started, found and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from lockstep.cli.bench import shares_gpus
from lockstep.cli.flags import parse_bench
from lockstep.runtime.local_cluster.gpu_sharing import CONTROL, PIPES, shared_gpu

DAEMON = """#!/bin/bash
if [ "$1" = -f ]; then
  {before}
  echo $$ > "$CUDA_MPS_LOG_DIRECTORY/../pid"
  mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control"
  read word < "$CUDA_MPS_PIPE_DIRECTORY/control"
  {after}
  echo "$word" > "$CUDA_MPS_LOG_DIRECTORY/../last_word"
else
  read word
  echo "$word" > "$CUDA_MPS_PIPE_DIRECTORY/control"
fi
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("lockstep.runtime.local_cluster.gpu_sharing.USUAL_PIPES", tmp_path / "usual")
    return tmp_path


def install(place: Path, before: str = "", after: str = "") -> None:
    program = place / CONTROL
    program.write_text(DAEMON.replace("{before}", before).replace("{after}", after))
    program.chmod(0o755)


def is_alive(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_daemon_is_there_for_as_long_as_the_cluster_and_leaves_nothing(place: Path) -> None:
    install(place, after="sleep 0.3")  # slower than who asks it to end, whose word is taken at once
    said: list[str] = []
    environment = dict(os.environ)
    with shared_gpu(environment, said.append):
        assert Path(environment[PIPES], "control").exists()
        pid = int((place / "pid").read_text())
        assert is_alive(pid)
    assert not is_alive(pid)
    assert (place / "last_word").read_text() == "quit\n"
    assert PIPES not in environment
    assert said == []
    assert [path.name for path in place.iterdir() if path.is_dir()] == []


def test_a_daemon_that_does_not_start_is_reported_and_the_cluster_runs_without(place: Path) -> None:
    install(place, before='echo "no GPU in sight"; exit 1')
    said: list[str] = []
    environment = dict(os.environ)
    with shared_gpu(environment, said.append):
        assert PIPES not in environment
    assert said == ["server and workers take turns on a GPU: NVIDIA's MPS did not start: no GPU in sight"]


def test_a_missing_mps_is_reported(place: Path) -> None:
    said: list[str] = []
    with shared_gpu({"PATH": str(place)}, said.append):
        pass
    assert said == [f"server and workers take turns on a GPU: {CONTROL} is not installed on this machine"]


def test_a_daemon_that_runs_already_is_used(place: Path) -> None:
    install(place)
    (place / "usual").mkdir()
    (place / "usual" / "control").touch()
    said: list[str] = []
    environment = dict(os.environ)
    with shared_gpu(environment, said.append):
        assert environment == dict(os.environ)
    assert said == []
    assert not (place / "pid").exists()


def test_it_ends_with_a_cluster_that_is_killed(place: Path) -> None:
    install(place)
    code = (
        "import os, sys; from lockstep.runtime.local_cluster.gpu_sharing import shared_gpu\n"
        "with shared_gpu(os.environ, print):\n print('up', flush=True); sys.stdin.read()"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        pid = int((place / "pid").read_text())
        program.kill()
    wait_until(lambda: not is_alive(pid), 10, "the daemon has ended")


def test_servers_on_the_gpu_of_workers_share_it_unless_told_not_to() -> None:
    def shared(*flags: str) -> bool:
        return shares_gpus(parse_bench(["--ps=1", "--workers=1", *flags], {}))

    assert shared()
    assert not shared("--nomps")
    assert not shared("--local_parameter_device=cpu")
    assert not shared("--restarts=1")
    assert not shared("--train_dir=/tmp/somewhere")
