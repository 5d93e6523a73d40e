"""``lockstep why`` in this process: whom it asks, and what it says before it does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diagnose.faulty import frozen
from helpers.snapshots import PS0
from lockstep.cli.forming import forming_line
from lockstep.cli.main import main
from lockstep.protocol.core.ids import CHIEF, server, worker
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.running_jobs import listed

JOB = 0xBEEF
STARTED = re.compile(r", started \d+ s ago")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory without anybody's jobs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def job(number: int) -> Iterator[dict[str, str]]:
    """The addresses of two monitors of one job, whose tasks have not begun to listen."""
    with ExitStack() as stack:
        records = [TaskRecord(str(task), "1", os.getpid()) for task in (server(0), worker(0))]
        cluster = {}
        for record, task in zip(records, (server(0), worker(0)), strict=True):
            record.on_report(TaskReport(phase="training", job=number))
            service = MonitorService("127.0.0.1", 0, record)
            stack.callback(service.close)
            cluster[str(task)] = service.address
        for record, (name, address) in zip(records, cluster.items(), strict=True):
            record.cluster = tuple(cluster.items())
            stack.enter_context(listed(name, address, cluster, os.getpid()))
        yield cluster


def left_by_a_dead_job(temporary: Path) -> Path:
    folder = temporary / f"lockstep-{os.geteuid()}" / "00000000000000aa"
    folder.mkdir(0o700, parents=True)
    folder.parent.chmod(0o700)
    (folder / "ps-0.snapshot.json").write_text(json.dumps(frozen().task(PS0)))
    return folder


def asked_tasks(out: str) -> list[str]:
    return [task["task"] for task in json.loads(out)["tasks"]]


def test_the_only_running_job_is_asked_whatever_a_dead_one_has_left(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = left_by_a_dead_job(temporary)
    with job(JOB) as cluster:
        main(["why"])
        out, err = capsys.readouterr()
        assert STARTED.sub("", err) == f"lockstep: asking job {JOB:016x}, 2 tasks in {Path.cwd()}\n"
        assert str(dead) not in out
        main(["why", "--json"])
        assert asked_tasks(capsys.readouterr().out) == list(cluster)
    assert main(["why"]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(rf"From the files of job 000000000000cafe in {dead}, \d+ s old; nothing was asked\.", first)


def test_several_running_jobs_are_listed_and_one_is_asked_by_its_number(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(JOB) as first, job(0) as second:
        assert main(["why"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        heading, *rows = err.splitlines()
        assert heading == "lockstep: 2 jobs of yours run on this host; ask one of them:"
        assert {STARTED.sub("", row) for row in rows} == {
            f"lockstep: lockstep why {first[str(server(0))]}    job {JOB:016x}, 2 tasks in {Path.cwd()}",
            f"lockstep: lockstep why {second[str(server(0))]}    a job without a number yet, 2 tasks in {Path.cwd()}",
        }
        main(["why", f"{JOB:016x}", "--json"])
        assert asked_tasks(capsys.readouterr().out) == list(first)
        main(["why", second[str(worker(0))], "--json"])
        assert asked_tasks(capsys.readouterr().out) == list(second)


def test_a_number_of_no_job_is_bad_input(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(JOB):
        for number in ("1234", "beef"):
            assert main(["why", number]) == 2
            assert "nor the number of a job of yours on this host" in capsys.readouterr().err


def test_a_job_of_host_lists_or_of_one_command_says_at_its_start_how_to_ask_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with forming_line({server(0): "10.0.0.1:1", CHIEF: "127.0.0.1:2"}):
        assert capsys.readouterr().err == "lockstep: ask this job with: lockstep why 127.0.0.1:2\n"


def test_alive_asks_one_monitor_only(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(JOB) as cluster:
        address = cluster[str(worker(0))]
        assert main(["why", "--alive", address]) == 0
        assert capsys.readouterr().out == f"{worker(0)} at {address}: training\n"
    assert main(["why", "--alive", address]) == 3
    assert "nothing listens there" in capsys.readouterr().out


def test_alive_finds_the_task_of_its_pod(
    temporary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(JOB) as cluster:
        hosts = {"ps": [cluster[str(server(0))]], "worker": [cluster[str(worker(0))]]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": hosts, "task": {"type": "ps", "index": 0}}))
        assert main(["why", "--alive"]) == 0
        assert capsys.readouterr().out.startswith(f"{server(0)} at {hosts['ps'][0]}")
    monkeypatch.delenv("TF_CONFIG")
    assert main(["why", "--alive"]) == 2
    assert main(["why", "--alive", "--json"]) == 2
