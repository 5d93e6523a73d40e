"""``lockstep top`` and ``lockstep dashboard`` from the command line: what is watched, and the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diagnose.faulty import frozen
from helpers.snapshots import healthy
from lockstep.cli.main import main
from lockstep.cli.top_screen import screen
from lockstep.dashboard.board import LiveBoard
from lockstep.dashboard.frame import Frame, FrameMaker, Look
from lockstep.dashboard.simulated import SimulatedCluster
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.evidence import Evidence


@pytest.mark.parametrize("command", ["top", "dashboard"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/no/such/folder"], "is neither an address like HOST:PORT nor a folder; give one of the two."),
        (["a:1", "b:2"], "takes one address or one folder; any task of the cluster will do."),
        (["--wat"], "has no flag '--wat'; it has --simulate"),
        (["--simulate"], "--simulate needs a value; write --simulate=VALUE."),
        (["--simulate=1"], "--simulate=1 must be a whole number from 2 to 10000."),
        (["--simulate=8", "a:1"], "give --simulate, or an address or folder; not both."),
        (["--fault={}", "a:1"], "--fault is planted in a simulated cluster"),
        (["--simulate=4", "--fault=nonsense"], "--fault cannot be planted: "),
    ],
)
def test_bad_words_give_one_sentence(
    command: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_port_that_is_no_port_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--simulate=4", "--port=99999"]) == 2
    assert "--port=99999 must be a whole number from 1 to 65535." in capsys.readouterr().err


def frame_of(evidence: Evidence) -> Frame:
    return FrameMaker("live", "node1:4000").frame(Look(evidence.tasks, analyse(evidence), 1.0, 1000.0))


def text_of(frame: Frame, width: int = 110, height: int = 0) -> str:
    console = Console(file=io.StringIO(), width=width, height=height or None, color_system=None)
    console.print(screen(frame, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_says_who_is_frozen_who_waits_and_what_helps_without_any_colour() -> None:
    shown = text_of(frame_of(frozen().evidence()))
    for words in ("✕ stuck", "worker 1: frozen", "kill -CONT", "! ", "ps 0 → worker 1", "‖ 1 stopped"):
        assert words in shown
    assert "✓ healthy" in text_of(frame_of(healthy().evidence()))


@pytest.fixture(scope="module")
def many() -> Frame:
    source = SimulatedCluster(49, 1)
    board = LiveBoard(source)
    for second in (2, 3):
        source.advance(second)
        board.look()
    newest = board.wait_newer(0, 0.0)
    assert newest is not None
    return newest[0]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (110, 40), (200, 60)])
def test_many_tasks_fit_on_one_screen(many: Frame, width: int, height: int) -> None:
    lines = text_of(many, width, height).rstrip("\n").splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_without_a_terminal_the_screen_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--simulate=4"]) == 0
    assert "a simulated job of 1 server and 3 workers" in capsys.readouterr().out
