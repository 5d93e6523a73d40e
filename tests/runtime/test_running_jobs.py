"""The user's running tasks on this host, as ``lockstep why`` finds them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.other_user import everybodys_folder, needs_root, nobody_does
from lockstep.runtime.running_jobs import FOLDER, LocalJob, listed, running_jobs

US = os.geteuid()
ONE = {"ps 0": "10.0.0.1:1", "worker 0": "10.0.0.1:2"}
OTHER = {"worker 0": "10.0.0.1:3"}

LISTED = """\
import os, signal, sys
from lockstep.runtime.running_jobs import listed
with listed("worker 0", "10.0.0.1:9", {}, os.getpid()):
    print("listed", flush=True)
    signal.pause()
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of this test."""
    tmp_path_factory.getbasetemp()  # pytest makes its own on first use, where the temporary directory is then
    with everybodys_folder() as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        yield folder


def test_tasks_of_one_cluster_are_one_job_and_leave_nothing_behind(shared: Path) -> None:
    assert running_jobs() == []
    with (
        listed("ps 0", "", ONE, os.getpid()),
        listed("worker 0", "", OTHER, os.getpid()),
        listed("worker 0", "", ONE, os.getpid()),
    ):
        found = {len(job.here): job for job in running_jobs()}
        both, alone = found[2], found[1]
        assert ([task.task for task in both.here], both.cluster, both.address) == (
            ["ps 0", "worker 0"],
            ONE,
            ONE["ps 0"],
        )
        assert (alone.cluster, alone.here[0].folder) == (OTHER, str(Path.cwd()))
        assert time.time() - 60 < both.started <= alone.started
        private = [(path.lstat().st_uid, stat.S_IMODE(path.lstat().st_mode)) for path in shared.rglob("*")]
        assert sorted(private) == [(US, 0o600)] * 3 + [(US, 0o700)] * 2
    assert running_jobs() == []
    assert list((shared / f"lockstep-{US}" / FOLDER).iterdir()) == []


def test_a_task_without_a_list_of_the_cluster_is_found_at_its_own_address(shared: Path) -> None:
    with listed("worker 0", "10.0.0.1:7", {}, os.getpid()):
        assert [job.address for job in running_jobs()] == ["10.0.0.1:7"]


def test_the_entry_of_a_killed_process_is_ignored_and_removed(shared: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(shared)}
    with subprocess.Popen([sys.executable, "-c", LISTED], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listed\n"
        assert [job.address for job in running_jobs()] == ["10.0.0.1:9"]
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    entries = shared / f"lockstep-{US}" / FOLDER
    assert len(list(entries.iterdir())) == 1
    assert running_jobs() == []
    assert list(entries.iterdir()) == []


def test_what_is_not_an_entry_is_left_out(shared: Path) -> None:
    with listed("worker 0", "10.0.0.1:7", {}, os.getpid()):
        entries = shared / f"lockstep-{US}" / FOLDER
        (entry,) = entries.iterdir()
        entry.write_text("[1, 2")  # still locked by this process
        os.mkfifo(entries / "pipe")
        (entries / "link").symlink_to("/etc/passwd")
        assert running_jobs() == []


@needs_root
def test_nothing_of_another_user_counts(shared: Path) -> None:
    nobody_does(f"mkdir -p lockstep-{US}/{FOLDER}; echo '{{}}' > lockstep-{US}/{FOLDER}/entry", shared)
    with listed("worker 0", "10.0.0.1:7", {}, os.getpid()):
        (job,) = running_jobs()
    assert isinstance(job, LocalJob)
    assert job.address == "10.0.0.1:7"


def test_a_temporary_directory_that_cannot_be_written_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with listed("worker 0", "10.0.0.1:7", {}, os.getpid()):
        assert running_jobs() == []
