"""What a job does with the checkpoints it finds: it resumes, starts at step 0 if there are none, or is refused."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.programs import run_lockstep
from helpers.written import SETTINGS, Written
from lockstep.cli import checkpoint
from lockstep.errors import BadInput
from lockstep.library.settings import Exchange, Keeping
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, server
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.checkpoint.folder import MANIFEST, CheckpointFolder
from lockstep.runtime.checkpoint.resuming import beginning_in
from lockstep.runtime.startup.cluster import ClusterSpec


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path)
    assert [made.write(version) for version in (20, 40, 60)] == ["", "", ""]
    yield made
    made.writer.close()


def start_of(train_dir: Path, said: list[str] | None = None, *, from_scratch: bool = False) -> int:
    """The step at which a job would start there."""
    say = (said if said is not None else []).append
    return beginning_in(str(train_dir), SETTINGS, say, from_scratch=from_scratch).start


def names(train_dir: Path) -> list[str]:
    return sorted(path.name for path in CheckpointFolder(train_dir).path.iterdir())


def cut(path: Path) -> None:
    os.truncate(path / "shard-1-of-2.safetensors", 100)


def flip(path: Path) -> None:
    file = path / "shard-0-of-2.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty_the_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST, 0)


def remove_a_shard(path: Path) -> None:
    (path / "shard-1-of-2.safetensors").unlink()


DAMAGES = [cut, flip, empty_the_manifest, remove_a_shard]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_without_one_whole_checkpoint_is_refused_and_stays_as_it_is(
    written: Written, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for path in written.folder.complete():
        damage(path)
    before = names(tmp_path)
    for _ in range(2):
        with pytest.raises(BadInput) as refused:
            start_of(tmp_path)
        (sentence,) = refused.value.sentences
        assert f"none of the 3 checkpoints in {written.folder.path} can be used" in sentence
        assert "give another --train_dir, or start at step 0 with --from_scratch" in sentence
        assert names(tmp_path) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", [cut, empty_the_manifest, remove_a_shard])
def test_the_command_refuses_it_with_one_sentence_before_it_starts_anything(
    written: Written, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for path in written.folder.complete():
        damage(path)
    flags = ("--model=lenet", "--device=cpu", "--ps=1", "--workers=1", "--num_batches=1")
    done = run_lockstep("bench", *flags, f"--train_dir={tmp_path}", timeout=30)
    assert done.code == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "none of the 3 checkpoints" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ones_are_named_once_kept_under_another_name_and_never_removed(
    written: Written, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    newest, second, _ = written.folder.complete()
    damage(newest)
    damage(second)
    said: list[str] = []
    assert start_of(tmp_path, said) == 20
    for path in (newest, second):
        assert len([one for one in said if path.name in one]) == 1
    again: list[str] = []
    assert start_of(tmp_path, again) == 20
    assert len(again) == 1, "the job starts from the checkpoint, and nothing else"
    keeps_one = Written(tmp_path, keep=1)
    assert [keeps_one.write(version) for version in (30, 50, 70)] == ["", "", ""]
    keeps_one.writer.close()
    kept = {f"{newest.name}.damaged", f"{second.name}.damaged"}
    assert kept < set(names(tmp_path))
    assert len(names(tmp_path)) == 3, "the newest whole one beside them"


def test_a_folder_with_nothing_but_what_an_earlier_start_found_damaged_is_refused(
    written: Written, tmp_path: Path
) -> None:
    newest, *others = written.folder.complete()
    cut(newest)
    assert start_of(tmp_path) == 40
    for path in others:
        shutil.rmtree(path)
    with pytest.raises(BadInput, match="has only damaged checkpoints"):
        start_of(tmp_path)


def test_a_folder_without_checkpoints_starts_at_step_0(tmp_path: Path) -> None:
    said: list[str] = []
    assert start_of(tmp_path, said) == INITIAL_STEP
    (tmp_path / "checkpoints" / "step-00000020-11223344.part").mkdir(parents=True)
    assert start_of(tmp_path, said) == INITIAL_STEP
    assert said == []
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_bytes(b"a file where the folder should be")
    with pytest.raises(BadInput, match=r"cannot be read .*Not a directory"):
        start_of(tmp_path)


def test_one_of_another_format_is_passed_over_and_not_called_damaged(written: Written, tmp_path: Path) -> None:
    newest = written.folder.complete()[0]
    rewrite(newest, b'"format": 1', b'"format": 2')
    assert start_of(tmp_path) == 40
    keeps_one = Written(tmp_path, keep=1)
    assert keeps_one.write(50) == ""
    keeps_one.writer.close()
    assert [path.name[:13] for path in written.folder.complete()] == ["step-00000060", "step-00000050"]


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    """Change a manifest and give it the matching checksum."""
    file = path / MANIFEST
    text = file.read_bytes().partition(b"\n")[2]
    assert old in text
    text = text.replace(old, new)
    file.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"version": 60', b'"version": Infinity'),
        (b'"version": 60', b'"version": 1e999'),
        (b'"version": 60', b'"version": -60'),
        (b'"written": 1', b'"written": 1e300, "was": 1'),
        (b'"settings": {', b'"nested": ' + b"[" * 200_000 + b"]" * 200_000 + b', "settings": {'),
        (b'"servers": 2', b'"servers": 3'),
        (b'"worker-0.safetensors"', b'"elsewhere.safetensors"'),
        (b'"settings": {', b'"settings": [], "were": {'),
    ],
    ids=["infinity", "no end", "negative", "far future", "deep nesting", "a shard too few", "no worker", "a list"],
)
def test_a_manifest_of_nonsense_is_a_damaged_one(written: Written, tmp_path: Path, old: bytes, new: bytes) -> None:
    rewrite(written.folder.complete()[0], old, new)
    assert checkpoint.run(["show", str(tmp_path)]) == 1
    said: list[str] = []
    assert start_of(tmp_path, said) == 40
    assert "that Lockstep did not write" in said[0]


def test_looking_at_checkpoints_renames_none(written: Written, tmp_path: Path) -> None:
    cut(written.folder.complete()[0])
    before = names(tmp_path)
    assert checkpoint.run(["verify", str(tmp_path)]) == 1
    assert checkpoint.run(["show", str(tmp_path)]) == 0
    assert names(tmp_path) == before


@pytest.mark.parametrize("damage", [cut, lambda path: None], ids=["damaged", "whole"])
def test_from_scratch_starts_at_step_0_and_puts_aside_what_was_there(
    written: Written, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    before = names(tmp_path)
    for path in written.folder.complete():
        damage(path)
    said: list[str] = []
    assert start_of(tmp_path, said, from_scratch=True) == INITIAL_STEP
    aside = written.folder.path / "before-1"
    assert said == [f"starting from scratch: the checkpoints that were in {written.folder.path} are now in {aside}"]
    assert names(aside) == before
    assert start_of(tmp_path) == INITIAL_STEP, "a lost server before the first checkpoint: back to the beginning"
    keeps_one = Written(tmp_path, keep=1)
    assert keeps_one.write(5) == ""
    keeps_one.writer.close()
    assert start_of(tmp_path) == 5
    assert names(aside) == before, "no pruning touches it"
    assert start_of(tmp_path, from_scratch=True) == INITIAL_STEP
    assert len(names(written.folder.path / "before-2")) == 1


def test_what_was_put_aside_is_a_separate_train_dir(written: Written, tmp_path: Path) -> None:
    start_of(tmp_path, from_scratch=True)
    assert start_of(written.folder.path / "before-1") == 60


def test_from_scratch_is_a_way_out_of_a_folder_of_another_run(written: Written, tmp_path: Path) -> None:
    other = (Setting("model", "vgg16"),)
    with pytest.raises(BadInput, match="--from_scratch"):
        beginning_in(str(tmp_path), other, written.said.append)
    assert beginning_in(str(tmp_path), other, written.said.append, from_scratch=True).start == INITIAL_STEP


def test_your_own_program_is_refused_in_the_same_way_and_may_start_from_scratch(tmp_path: Path) -> None:
    from lockstep.library.node_config import node_config

    made = Written(tmp_path, settings=(Setting("program", "your own program"),))
    assert made.write(20) == ""
    made.writer.close()
    cluster = ClusterSpec(ps_hosts=("127.0.0.1:1",), worker_hosts=("127.0.0.1:2",)).for_task(server(0))
    assert cluster.shape == ClusterShape(1, 1)
    keeping = Keeping(train_dir=str(tmp_path))
    assert node_config(cluster, Exchange(), keeping).beginning.start == 20
    cut(made.folder.complete()[0])
    with pytest.raises(BadInput, match="none of the 1 checkpoints"):
        node_config(cluster, Exchange(), keeping)
    anew = Keeping(train_dir=str(tmp_path), from_scratch=True)
    assert node_config(cluster, Exchange(), anew).beginning.start == INITIAL_STEP
