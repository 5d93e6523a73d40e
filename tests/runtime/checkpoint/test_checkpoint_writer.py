"""Whatever a disk does, the thread that writes checkpoints survives, answers, and reports the problem once."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from helpers.written import JOB, Written
from lockstep.protocol.core.messages import Saved
from lockstep.runtime.checkpoint.folder import CheckpointFolder, read_manifest
from lockstep.runtime.checkpoint.tensor_file import NamedTensor


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path)
    yield made
    made.writer.close()


def versions(folder: CheckpointFolder) -> list[int]:
    return [read_manifest(path).version for path in folder.complete()]


def test_a_folder_in_the_place_of_the_shard_costs_one_checkpoint_and_not_the_thread(written: Written) -> None:
    planted = written.folder.part(20, JOB) / "shard-0-of-2.safetensors"
    (planted / "something").mkdir(parents=True)
    assert "Is a directory; move away what is in its place" in written.write(20)
    assert written.write(40) == ""
    assert versions(written.folder) == [40]
    assert "THE CHECKPOINT OF STEP 20 COULD NOT BE WRITTEN" in written.said[0]
    assert str(written.folder.path) in written.said[0]


def test_a_failure_is_reported_once_for_as_long_as_it_lasts_and_so_is_its_end(written: Written) -> None:
    written.folder.path.write_bytes(b"a file where the folder should be")
    assert written.write(20) == written.write(40) != ""
    failing = [written.writer.failing]
    assert len(written.said) == 1
    written.folder.path.unlink()
    assert written.write(60) == ""
    assert [*failing, written.writer.failing] == [True, False]
    assert written.said[1:] == [f"checkpoints can be written again: the one of step 60 is in {written.folder.path}"]
    assert written.write(80) == ""
    assert len(written.said) == 2
    shutil.rmtree(written.folder.path)
    written.folder.path.write_bytes(b"again")
    assert written.write(100) != ""
    assert "STEP 100" in written.said[2]


def test_a_train_dir_that_is_removed_while_a_checkpoint_is_written_costs_that_one(written: Written) -> None:
    assert written.write(20) == ""
    assert "is not visible here" in written.write(40, before_the_manifest=lambda: shutil.rmtree(written.folder.path))
    assert written.write(60) == ""
    assert versions(written.folder) == [60]


def test_an_error_that_is_not_the_disks_is_answered_too(written: Written) -> None:
    data = memoryview(b"1234")
    tensor = NamedTensor("value|0||a", "U8", (4,), data)
    data.release()
    answers: list[Saved] = []
    written.writer.write_shard(20, JOB, "shard-0-of-2.safetensors", [tensor], answers.append)
    wait_until(lambda: bool(answers), 10, "an answer")
    assert "ValueError" in answers[0].problem
    assert written.write(40) == ""


def test_an_answer_that_nobody_can_take_does_not_end_the_thread(written: Written) -> None:
    def refuse(saved: Saved) -> None:
        raise RuntimeError(f"nobody is there for {saved.file}")

    written.writer.write_shard(20, JOB, "shard-0-of-2.safetensors", [], refuse)
    assert written.write(40) == ""
    assert "nobody is there for shard-0-of-2.safetensors; it continues" in written.said[0]


def test_while_a_shard_is_written_it_is_known_which_and_when_its_last_bytes_were(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes as long as the test wants."""
    syncs, may_end, sync = threading.Event(), threading.Event(), os.fsync

    def slow_sync(descriptor: int) -> None:
        syncs.set()
        may_end.wait(20)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_sync)
    tensor = NamedTensor("value|0||a", "U8", (3 << 20,), memoryview(bytes(3 << 20)))
    answers: list[Saved] = []
    written.writer.write_shard(20, JOB, "shard-0-of-2.safetensors", [tensor], answers.append)
    assert syncs.wait(10)
    writing = written.writer.writing
    assert writing is not None
    assert writing.file == str(written.folder.part(20, JOB) / "shard-0-of-2.safetensors")
    assert writing.wrote_at > writing.since
    may_end.set()
    wait_until(lambda: bool(answers), 10, "an answer")
    assert written.writer.writing is None


def test_old_checkpoints_that_cannot_be_removed_are_named_once_and_the_new_one_counts(tmp_path: Path) -> None:
    made = Written(tmp_path, keep=1)
    assert made.write(20) == ""
    (old,) = made.folder.complete()
    in_the_way = old.with_name(old.name + ".part")
    (in_the_way / "something").mkdir(parents=True)
    assert made.write(40) == made.write(60) == ""
    assert not made.writer.failing
    assert versions(made.folder) == [60, 20]
    assert len(made.said) == 1
    assert f"could not be removed from {made.folder.path}: Directory not empty" in made.said[0]
    shutil.rmtree(in_the_way)
    assert made.write(80) == ""
    assert versions(made.folder) == [80]
    made.writer.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_becomes_read_only_under_a_half_written_shard_is_reported_and_survived(disk: Path) -> None:
    """As many file systems behave after a disk error: nothing can be removed any more."""
    made = Written(disk)
    assert made.write(20) == ""
    half = made.folder.part(40, JOB) / "shard-0-of-2.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert "Read-only file system; make that folder writable" in made.write(40)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert made.write(40) == ""
    assert versions(made.folder) == [40, 20]
    made.writer.close()
