"""``lockstep why`` finds a watched job that runs, and its metrics: in this process, without torch."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.diagnose.verdict import Diagnosis, TaskLine, Verdict
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.runtime.processes import wait_readable
from lockstep.runtime.startup.pages import NO_PAGES
from lockstep.watch.asking import findable, watched_jobs
from lockstep.watch.entry import watch_folder
from lockstep.watch.job_metrics import JobBoard
from lockstep.watch.reports import MadeReport, Reports
from lockstep.watch.sights import RankSight, Vitality

NUMBER = "00000000000000c5"
LINE = TaskLine(task="rank 0", host="here", pid=1, step=7, doing="computes", answers=True)
WELL = Diagnosis(healthy=True, summary="all ranks have made 7 steps", job=NUMBER, tasks=(LINE,))
STUCK = Diagnosis(verdict=Verdict(cause=Cause.FROZEN, culprit="rank 1", what="rank 1 is stopped", remedy="Resume it."))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@contextlib.contextmanager
def watcher(diagnosis: Diagnosis, number: str = NUMBER) -> Iterator[None]:
    over = threading.Event()
    with watch_folder() as folder, findable(folder, number, ["torchrun", "train.py"]) as door:

        def serve() -> None:
            while not over.is_set():
                wait_readable((door.fileno(),), 0.05)
                door.serve(lambda: diagnosis)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_a_watched_job_that_runs_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with watcher(WELL):
        assert main(["why"]) == 0
        out, err = capsys.readouterr()
        assert f"asking the watcher of the watched job {NUMBER} (torchrun train.py)" in err
        assert "nothing stands still" in out
        assert main(["why", NUMBER[:14], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tasks"][0]["step"] == 7
    assert watched_jobs() == []


def test_one_that_stands_still_has_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with watcher(STUCK):
        assert main(["why", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"]["culprit"] == "rank 1"


def test_several_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with watcher(WELL), watcher(STUCK, "00000000000000c6"):
        assert main(["why"]) == 2
        err = capsys.readouterr().err
        assert "2 jobs of yours run on this host" in err
        assert f"lockstep why {NUMBER}" in err
        assert main(["why", "00000000000000c6", "--json"]) == 3


def test_the_ranks_of_a_watched_job_are_shown_as_tasks() -> None:
    reports = Reports("", NO_PAGES, lambda _: None)
    board = JobBoard(reports)
    lives = [
        RankSight(rank=0, life=Vitality.RUNS),
        RankSight(rank=1, life=Vitality.STOPPED),
        RankSight(rank=2, life=Vitality.GONE, exit_code=-9),
    ]
    board.show(lives, {0: (10, 100.0), 1: (10, 100.0), 2: (9, 99.5), 3: (10, 100.0)})
    board.show(lives, {0: (14, 102.0), 1: (10, 100.0), 2: (9, 99.5), 3: (10, 100.0)})
    assert not board.look()
    assert STUCK.verdict is not None
    reports.made.append(MadeReport(ReportKind.VERDICT, STUCK.verdict, 0.0))
    assert board.look()
    assert not board.look()
    lines = board.text().splitlines()
    assert 'lockstep_step{task="rank 0"} 14' in lines
    assert 'lockstep_last_step_seconds{task="rank 0"} 0.5' in lines
    assert 'lockstep_task_stopped{task="rank 1"} 1' in lines
    assert 'lockstep_task_up{task="rank 2"} 0' in lines
    assert 'lockstep_task_exit_code{task="rank 2"} -9' in lines
    assert 'lockstep_step{task="rank 3"} 10' in lines
    assert not any('lockstep_task_up{task="rank 3"}' in line for line in lines), "it is on another host"
    said = f'lockstep_verdict_info{{task="{reports.task}",kind="verdict",cause="frozen",culprit="rank 1"}}'
    assert f"{said} 1" in lines
    board.moved()
    assert f"{said} 0" in board.text().splitlines()
    slow = Verdict(cause=Cause.STRAGGLER, culprit="rank 1")
    reports.made.append(MadeReport(ReportKind.NOTICE, slow, time.time()))
    board.moved()
    assert 'kind="notice",cause="straggler",culprit="rank 1"} 1' in board.text(), "though steps end"


def test_a_job_is_not_started_if_its_metrics_cannot_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", f"--metrics_port={port}", "--", "touch", str(begun)]) == 2
    assert "give another --metrics_port" in capsys.readouterr().err
    assert not begun.exists()


def test_what_the_file_of_metrics_has_at_the_end(tmp_path: Path) -> None:
    """Without torch there are no ranks, but the watcher itself is shown."""
    assert main(["watch", f"--metrics_file={tmp_path / 'job.prom'}", "--", "true"]) == 0
    assert "lockstep_task_info" in (tmp_path / "job-watch.prom").read_text()
