"""Checkpoints on disk: a crash, a flipped bit, a cut or a full disk never costs more than the newest one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from helpers.written import JOB, SETTINGS, Written
from lockstep.errors import BadInput
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.checkpoint import resuming
from lockstep.runtime.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    CheckpointFolder,
    read_manifest,
    verify,
)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path)
    yield made
    made.writer.close()


def newest(folder: CheckpointFolder) -> tuple[int, list[str]]:
    said: list[str] = []
    found = resuming.newest(folder, SETTINGS, said.append)
    return (-1 if found is None else found.manifest.version), said


def test_what_was_written_is_found_with_its_states(written: Written) -> None:
    assert written.write(20) == written.write(40) == ""
    beginning = resuming.resume(written.folder, SETTINGS, written.said.append)
    assert (beginning.start, beginning.states) == (40, {0: b"state of 0", 1: b"state of 1"})
    assert beginning.state_of(5) == b"state of 0"
    assert written.said == []


def test_the_oldest_are_cleared_away(tmp_path: Path) -> None:
    made = Written(tmp_path, keep=2)
    for version in (1, 2, 3, 4):
        assert made.write(version) == ""
    made.writer.close()
    assert [read_manifest(path).version for path in made.folder.complete()] == [4, 3]
    assert len(list(made.folder.path.iterdir())) == 2


def every_file(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def flip(file: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)


def cut(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.randrange(file.stat().st_size))


def remove(file: Path, dice: random.Random) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    written: Written, damage: Callable[[Path, random.Random], None]
) -> None:
    written.write(20)
    for version in range(40, 60):
        written.write(version)
        path = written.folder.complete()[0]
        files = every_file(path)
        broken = files[version % len(files)]
        damage(broken, random.Random(version))
        found, said = newest(written.folder)
        assert found == 20, f"{broken} was damaged"
        assert str(path) in said[0]
        assert f"it is kept as {path.name}.damaged, and an older one is used" in said[0]
        assert newest(written.folder) == (20, []), "it was said once"
        shutil.rmtree(path.with_name(path.name + ".damaged"))


def test_what_is_half_written_is_never_read(written: Written) -> None:
    written.write(20)
    part = written.folder.part(40, JOB)
    part.mkdir()
    (part / MANIFEST).write_bytes((written.folder.complete()[0] / MANIFEST).read_bytes())
    assert newest(written.folder) == (20, [])
    written.folder.clear_parts()
    assert not part.exists()


def test_a_folder_of_another_program_is_passed_over(written: Written) -> None:
    written.write(20)
    foreign = written.folder.path / "step-00000099-deadbeef"
    foreign.mkdir()
    (foreign / MANIFEST).write_text("{}")
    version, said = newest(written.folder)
    assert version == 20
    assert "damaged manifest" in said[0]


def test_a_checkpoint_of_another_run_is_named_and_never_mixed_in(written: Written) -> None:
    written.write(20)
    with pytest.raises(CheckpointError, match=r"belongs to another run: it has model=lenet, this run has model=vgg16"):
        resuming.newest(written.folder, (Setting("model", "vgg16"),), written.said.append)
    train_dir = str(written.folder.path.parent)
    with pytest.raises(BadInput, match="belongs to another run"):
        resuming.refuse_early(train_dir, (Setting("model", "vgg16"),))
    resuming.refuse_early(train_dir, SETTINGS)


def test_other_numbers_of_tasks_are_reported_with_what_then_differs(written: Written) -> None:
    written.write(20)
    settings = (Setting("model", "lenet"), Setting("number of servers", "3"), Setting("number of workers", "1"))
    assert resuming.resume(written.folder, settings, written.said.append).start == 20
    assert "the result does not change" in written.said[0]
    assert "the run differs from here on" in written.said[1]


def test_a_name_that_leads_out_of_the_folder_is_refused(written: Written) -> None:
    import hashlib

    written.write(20)
    file = written.folder.complete()[0] / MANIFEST
    text = file.read_bytes().partition(b"\n")[2].replace(b"shard-0-of-2.safetensors", b"../../../etc/passwd")
    file.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    with pytest.raises(CheckpointError, match="that Lockstep did not write"):
        verify(file.parent)


def test_a_disk_that_takes_no_more_is_reported_and_the_old_checkpoints_stay(written: Written) -> None:
    """A limit on file size stands in for a full disk where nothing can be mounted."""
    import resource

    assert written.write(20) == ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        assert "too large" in written.write(40, nbytes=200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "COULD NOT BE WRITTEN" in written.said[0]
    assert newest(written.folder) == (20, [])
    assert not list(written.folder.path.glob("*.part"))
    assert written.write(60, nbytes=200_000) == ""
    assert newest(written.folder) == (60, [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_file_system_is_reported_and_the_old_checkpoints_stay(small_disk: Path) -> None:
    made = Written(small_disk)
    assert made.write(20) == ""
    assert "No space left on device" in made.write(40, nbytes=600_000)
    assert newest(made.folder) == (20, [])
    assert made.write(60) == ""
    assert newest(made.folder)[0] == 60
    made.writer.close()


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from helpers.written import Written
made = Written(Path(sys.argv[1]), keep=3)
for version in range(int(sys.argv[3]), 100000):
    assert made.write(version, nbytes=300_000) == ""
    print(version, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_kill_during_the_write_never_costs_a_checkpoint_that_was_complete(tmp_path: Path) -> None:
    dice = random.Random(7)
    here = str(Path(__file__).parents[2])
    complete = version = 0
    for _ in range(50):
        out = tmp_path / "out"
        with out.open("wb") as printed:
            arguments = (str(tmp_path), here, str(version + 1))
            writer = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=printed)
            wait_until(lambda: len(out.read_text().splitlines()) >= 2, 30, "two checkpoints")  # noqa: B023
            delay = dice.uniform(0.0, 0.03)
            try:
                writer.wait(delay)
            except subprocess.TimeoutExpired:
                writer.kill()
                writer.wait()
        told = int(out.read_text().split()[-1])
        version, said = newest(CheckpointFolder(tmp_path))
        assert version >= told, f"checkpoint {told} was complete, and now {version} is the newest: {said}"
        assert said == []
        complete += told
    assert complete
