"""``lockstep checkpoint``: bad input, a damaged checkpoint, and the page of the machines that goes with recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.written import Written
from lockstep.cli import checkpoint, machine_diagrams
from lockstep.cli.main import main

MACHINES = Path(__file__).parents[2] / "docs" / "machines.md"


@pytest.fixture
def train_dir(tmp_path: Path) -> Path:
    made = Written(tmp_path)
    assert made.write(20) == made.write(40) == ""
    made.writer.close()
    return tmp_path


def test_show_tells_step_and_settings(train_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.run(["show", str(train_dir)]) == 0
    shown = capsys.readouterr().out
    assert "step 40" in shown
    assert "model: lenet" in shown


def test_verify_names_a_damaged_file(train_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.run(["verify", str(train_dir)]) == 0
    newest = max((train_dir / "checkpoints").iterdir())
    (newest / "worker-1.safetensors").write_bytes(b"other bytes")
    assert checkpoint.run(["verify", str(train_dir)]) == 1
    shown = capsys.readouterr().out
    assert "is damaged: worker-1.safetensors has 11 bytes instead of 10" in shown
    assert "is intact: step 20" in shown


@pytest.mark.parametrize(
    "words",
    [["show"], ["show", "/nowhere"], ["look", "."], ["export", "."], ["verify", ".", "--deep"]],
    ids=" ".join,
)
def test_bad_input_is_a_sentence_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *words]) == 2
    assert capsys.readouterr().err.startswith("lockstep: ")


def test_the_page_of_the_machines_is_made_from_their_tables() -> None:
    assert MACHINES.read_text() == machine_diagrams.document(), (
        "run python -m lockstep.cli.machine_diagrams > docs/machines.md"
    )
