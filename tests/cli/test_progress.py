"""The bar of a run: on a terminal only, with the time left where it can be known."""

from __future__ import annotations

import io
import sys

import pytest

from lockstep.cli.forming import FormingDisplay
from lockstep.cli.progress import LiveBar, NoBar, Output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_tells_stages_steps_and_evaluations_and_leaves_lines_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    output = Output()
    bar = output.make_progress()
    assert isinstance(bar, LiveBar)
    bar.stage("compiling, in the first step")
    assert shows(bar) == {"compiling, in the first step": (0, None, "")}
    bar.warm_up(1, 10)
    bar.step(5, 100, 123.4)
    bar.evaluation(2, 8)
    assert shows(bar) == {"training": (5, 100, "123.4 images/sec"), "evaluation": (2, 8, "")}
    bar.evaluation(8, 8)
    assert shows(bar) == {"training": (5, 100, "123.4 images/sec")}
    line = "10\timages/sec: 100.0 +/- 1.0 (jitter = 0.5)\t2.303"
    output.emit(line)
    output.close()
    assert line.split("\t")[1] in terminal.getvalue()


def shows(bar: LiveBar) -> dict[str, tuple[float, float | None, str]]:
    return {one.description: (one.completed, one.total, one.fields["rate"]) for one in bar._progress.tasks}


def test_without_a_terminal_there_are_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    bar = output.make_progress()
    assert isinstance(bar, NoBar)
    bar.stage("compiling, in the first step")
    bar.evaluation(1, 2)
    output.emit("a line")
    output.close()
    assert capsys.readouterr().out == "a line\n"


def test_a_start_tells_how_long_it_may_still_take_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    now = [100.0]
    monkeypatch.setattr("lockstep.cli.forming.time.monotonic", lambda: now[0])
    display = FormingDisplay(300.0)
    display.show("1 of 3 tasks are up")
    now[0] += 12.0
    display.show("2 of 3 tasks are up")
    display.over()
    first, second = terminal.getvalue().split("\x1b[K")[1:3]
    assert first.rstrip("\r") == "1 of 3 tasks are up"
    assert second.rstrip("\r") == "12 s, 288 s left: 2 of 3 tasks are up"
