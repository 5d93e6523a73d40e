"""Faults in real DDP and FSDP2 jobs over gloo, started by torchrun, that know nothing of Lockstep: the right word for
each, and whose fault it is. ``make test-watch``; two of them also run with the slow suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.ports import free_port
from lockstep.cli.main import main
from lockstep.protocol.core.causes import Cause, ReportKind
from watch.running import TRAIN, WatchedJob, torchrun

VERDICT, NOTICE = ReportKind.VERDICT, ReportKind.NOTICE
KINDS = ("ddp", "fsdp")


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault of rank 1, and what is to be said about it."""

    fault: str
    cause: Cause
    kind: ReportKind = VERDICT
    culprit: str = "rank 1"
    place: str = ""
    """The function of the program that is named."""


KILL = Planted("kill", Cause.DEAD)
SLEEP = Planted("sleep", Cause.USER_CODE, NOTICE, place="misbehave")
PLANTED = (
    KILL,
    SLEEP,
    Planted("stop", Cause.FROZEN),
    Planted("lock", Cause.USER_CODE, NOTICE, place="misbehave"),
    Planted("loop", Cause.LOOPING, NOTICE, place="misbehave"),
    Planted("gil", Cause.USER_CODE, NOTICE, place="misbehave"),
    Planted("loader", Cause.INPUT_STARVED),
    Planted("skip", Cause.OTHER_CALL),
    Planted("other_shape", Cause.OTHER_CALL),
    Planted("other_dtype", Cause.OTHER_CALL),
    Planted("opposite", Cause.DEADLOCK, culprit="ranks 0 and 1"),
    Planted("exit", Cause.OUT_OF_STEP),
    Planted("raise", Cause.FAILED, place="misbehave"),
    Planted("slow", Cause.STRAGGLER, NOTICE),
)


def what_is_said(one: Planted, kind: str, folder: Path) -> tuple[dict[str, Any], str]:
    command = torchrun(f"--kind={kind}", f"--fault={one.fault}", f"--mark={folder / 'mark'}")
    with WatchedJob(folder, command) as job:
        event = job.first_event()
        assert (event["kind"], event["cause"], event["culprit"]) == (one.kind, one.cause, one.culprit), job.text
        assert one.place in event["text"], job.text
        if one.kind is VERDICT:
            job.wait_for((job.folder / "report.json").exists, even_after=True)
        return event, job.text


@pytest.mark.watch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one", PLANTED, ids=lambda one: one.fault)
def test_a_fault_gets_the_right_word(
    one: Planted, kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    event, _ = what_is_said(one, kind, tmp_path)
    record_property("seconds", round(event["after"], 1))
    sys.stderr.write(f"{kind} {one.fault}: {event['cause']} after {event['after']:.1f} s\n")


@pytest.mark.watch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_leaves_a_report_that_why_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what_is_said(KILL, "ddp", tmp_path)
    assert main(["why", "--json", str(tmp_path / "run")]) == 3
    found = json.loads(capsys.readouterr().out)["verdict"]
    assert (found["cause"], found["culprit"]) == (Cause.DEAD, "rank 1")
    assert found["step"] >= 29
    assert not list(Path("/tmp").glob(f"lockstep-watch-{os.getpid()}-*"))


@pytest.mark.watch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_others_wait_for_a_bucket_that_is_named(tmp_path: Path) -> None:
    event, text = what_is_said(SLEEP, "ddp", tmp_path)
    assert event["key"].startswith("all_reduce ")
    assert event["step"] >= 29
    assert "watch/train.py:" in text


@pytest.mark.watch
@pytest.mark.timeout(600)
def test_a_rank_that_never_starts(tmp_path: Path) -> None:
    launcher = [sys.executable, str(TRAIN.with_name("two_of_three.py")), str(free_port()), str(TRAIN)]
    with WatchedJob(tmp_path, launcher) as job:
        (event,) = job.wait_for(job.events)
        assert (event["kind"], event["cause"], event["culprit"]) == (NOTICE, Cause.NEVER_STARTED, "rank 1"), job.text


@pytest.mark.watch
@pytest.mark.timeout(600)
def test_a_job_is_ended_on_request_only(tmp_path: Path) -> None:
    command = torchrun("--fault=opposite", f"--mark={tmp_path / 'mark'}")
    with WatchedJob(tmp_path, command, "--abort") as job:
        assert job.process.wait(200) == 3, job.text


@pytest.mark.watch
@pytest.mark.timeout(600)
def test_a_job_that_runs_already(tmp_path: Path) -> None:
    """Nobody is let in there, but a rank that is stopped is seen all the same."""
    mark = tmp_path / "mark"
    job = subprocess.Popen(torchrun("--fault=stop", "--at=3", f"--mark={mark}"), stderr=subprocess.DEVNULL)
    try:
        while not mark.exists():
            time.sleep(0.1)
        with WatchedJob(tmp_path, [], pids=[job.pid]) as watched:
            (event,) = watched.wait_for(watched.events)
            assert (event["kind"], event["cause"], event["culprit"]) == (VERDICT, Cause.FROZEN, "rank 1"), watched.text
    finally:
        from lockstep.runtime.processes import descendants, send_signal

        for facts in descendants(job.pid):
            send_signal(facts.pid, 9)
        job.kill()
        job.wait(60)
