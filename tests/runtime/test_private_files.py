"""Files whose names others can guess, in folders where others were first: no link is followed, nothing overwritten."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.other_user import NOBODY, SOMEBODY, being, everybodys_folder, needs_root, nobody_does
from lockstep.benchmark.outputs.event_file import EventFile
from lockstep.benchmark.outputs.times import file_name, write_times
from lockstep.private_files import NotOurs, fresh_file, open_to_append, replace_file
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import Saved
from lockstep.runtime.checkpoint.folder import CheckpointError, CheckpointFolder
from lockstep.runtime.checkpoint.tensor_file import write_bytes
from lockstep.runtime.checkpoint.writer import CheckpointWriter
from lockstep.runtime.local_cluster.output_relay import open_log
from lockstep.runtime.trace.task_trace import write_trace

SECRET = "what only its owner may change\n"
JOB = 0x0123456789ABCDEF


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "bashrc"
    file.write_text(SECRET)
    return file


def appended(folder: Path, name: str) -> None:
    with open_to_append(folder / name) as file:
        file.write(b"forged\n")


def logged(folder: Path, name: str) -> None:
    log = open_log(folder, name.removesuffix(".log"))
    assert log is not None
    with log:
        log.write(b"forged\n")


WRITERS: dict[str, tuple[str, Callable[[Path, str], object]]] = {
    "a file appended to": ("metric.log", appended),
    "a log": ("worker-0.log", logged),
    "a file replaced": ("run.log", lambda folder, name: replace_file(folder / name, b"forged\n")),
    "a new file": ("shard", lambda folder, name: fresh_file(folder / name).close()),
    "a shard": ("shard-0-of-1.safetensors", lambda folder, name: write_bytes(folder / name, b"forged\n")),
    "a trace": ("trace.json", lambda folder, name: write_trace(folder / name, {"forged": 1})),
    "half a trace": ("trace.json.part", lambda folder, _: write_trace(folder / "trace.json", {"forged": 1})),
    "times": (file_name(worker(0)), lambda folder, _: write_times(str(folder), worker(0), {"forged": 1})),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_nothing_is_written_through_a_planted_link(writer: str, kind: str, victim: Path, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    folder = tmp_path / "results"
    folder.mkdir()
    if kind == "symlink":
        (folder / name).symlink_to(victim)
    else:
        os.link(victim, folder / name)
    with contextlib.suppress(NotOurs):
        write(folder, name)
    assert victim.read_text() == SECRET


def test_summaries_follow_no_link(victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.benchmark.outputs.event_file.time.time", lambda: 1000.0)
    monkeypatch.setattr("lockstep.benchmark.outputs.event_file.socket.gethostname", lambda: "h")
    (tmp_path / f"events.out.tfevents.1000.h.{os.getpid()}").symlink_to(victim)
    events = EventFile(tmp_path)
    events.close()
    assert events.path.stat().st_size
    assert victim.read_text() == SECRET


def test_a_log_is_its_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        logged(tmp_path, "worker 0")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "worker-0.log").stat().st_mode) == 0o600


def test_a_file_beside_is_named_so_that_nobody_guesses_it_and_leaves_nothing(tmp_path: Path) -> None:
    replace_file(tmp_path / "new" / "a.json", b"1")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "taken", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "taken"]


def test_a_checkpoint_is_not_written_into_a_folder_behind_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = CheckpointFolder(tmp_path / "train")
    folder.path.mkdir(parents=True)
    folder.part(10, JOB).symlink_to(elsewhere)
    writer, said = CheckpointWriter(folder, 0, lambda _: None), list[Saved]()
    writer.write_shard(10, JOB, "shard-0-of-1.safetensors", [], said.append)
    writer.close()
    assert "it is not a real folder" in said[0].problem
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        *("..", ".", "", "/etc", "../../elsewhere", "step-00000010-abc/../../x", "step-00000010-abc/x"),
        *("step-x", "other", "step-00000010-abc.part", "step-00000010-abc.damaged", "step-00000010-\x00"),
    ],
)
def test_a_checkpoint_is_named_by_its_name_alone(name: str, tmp_path: Path) -> None:
    """It was ``train_dir / layout.checkpoint`` with whatever a peer had written."""
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint"):
        folder.named(name)
    assert folder.named("step-00000010-abc") == folder.path / "step-00000010-abc"


@needs_root
def test_a_file_of_another_user_is_not_appended_to() -> None:
    with everybodys_folder() as shared:
        nobody_does("touch metric.log && chmod 666 metric.log", shared)
        with being(SOMEBODY), pytest.raises((NotOurs, PermissionError)):
            appended(shared, "metric.log")
        assert (shared / "metric.log").stat().st_uid == NOBODY
        assert not (shared / "metric.log").read_bytes()
