"""``lockstep data``."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import main


@pytest.fixture(scope="module")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "small"
    assert main(["data", "sample", str(folder), "--pictures=40", "--files=2"]) == 0
    return folder


def test_a_sample_has_the_file_names_of_imagenet_and_is_whole(
    small_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(path.name for path in small_set.iterdir()) == [
        "train-00000-of-00002",
        "train-00001-of-00002",
        "validation-00000-of-00001",
    ]
    assert main(["data", "check", str(small_set)]) == 0
    said = capsys.readouterr().out
    assert "train: 32 records, 8 classes, 0 bad" in said
    assert "validation: 8 records, 8 classes, 0 bad" in said


def test_a_sample_of_folders_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    assert main(["data", "sample", str(folder), "--layout", "folders", "--pictures=40"]) == 0
    assert main(["data", "check", str(folder)]) == 0
    assert ": pictures\n" in capsys.readouterr().out


def test_check_names_a_damaged_record_and_missing_files(
    small_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((small_set / "train-00000-of-00002").read_bytes())
    content[500] ^= 1
    (tmp_path / "train-00000-of-00002").write_bytes(content)
    assert main(["data", "check", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "checksum of the record at byte 0 is wrong" in said
    assert "missing: train-00001-of-00002" in said
    assert "The set is damaged or incomplete." in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sample"], "give one folder: lockstep data sample DIR."),
        (["sample", "a", "--pictures=3"], "--pictures=3 must be a whole number from 10"),
        (["sample", "a", "--layout=zip"], "--layout=zip is not known"),
        (["sample", "a", "--colour=1"], "has no flag --colour"),
        (["check", "nowhere"], "does not exist"),
        (["mend", "a"], "there is no 'lockstep data mend'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_sample_is_never_written_over_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("keep")
    assert main(["data", "sample", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "keep"
