"""Faults in real DDP and FSDP2 jobs over gloo, started by torchrun, that know nothing of Lockstep: the right word for
each, and whose fault it is. ``make test-watch-drills``; two of them also run with the slow suite. The same faults in
programs of others are in ``test_scripts.py``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import wait_until
from lockstep.cli.main import main
from lockstep.drill.result import DrillStatus
from lockstep.drill.systems import SYSTEM_DRILLS, SYSTEMS, SystemDrill, events_in, run_system_drill, torchrun
from lockstep.drill.systems import watched as watched_job
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.runtime.processes import descendants, send_signal

PATIENCE = 240.0
"""For a busy machine: a healthy one needs a tenth of it."""
DRILLS = {drill.name: drill for drill in SYSTEM_DRILLS}


def wait_for(what: Callable[[], Any], output: Path) -> Any:
    """Fails with what was printed."""
    try:
        return wait_until(what, PATIENCE, "the job has come so far")
    except AssertionError as late:
        raise AssertionError(output.read_text(errors="replace")) from late


@pytest.mark.watch
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("drill", SYSTEM_DRILLS, ids=lambda drill: drill.name)
def test_a_fault_gets_the_right_word(drill: SystemDrill, system: str, tmp_path: Path) -> None:
    result = run_system_drill(drill, system, str(tmp_path))
    sys.stderr.write(f"{result.line()}\n")
    assert result.status is DrillStatus.PASSED, f"{result.reason}\n{result.report}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_leaves_a_report_that_why_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_system_drill(DRILLS["kill"], "ddp", str(tmp_path))
    assert result.status is DrillStatus.PASSED, result.report
    assert main(["why", "--json", str(tmp_path / "ddp-kill" / "run")]) == 3
    found = json.loads(capsys.readouterr().out)["verdict"]
    assert (found["cause"], found["culprit"]) == (Cause.DEAD, "rank 1")
    assert found["step"] >= 29


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_is_stopped_is_missed_with_a_module_of_fsdp(tmp_path: Path) -> None:
    result = run_system_drill(DRILLS["stop"], "fsdp", str(tmp_path))
    assert result.status is DrillStatus.PASSED, result.report
    verdict = json.loads((tmp_path / "fsdp-stop" / "run" / "report.json").read_text())["verdict"]
    assert verdict["key"].startswith("all_gather ")
    assert verdict["names"] == ["0.weight", "0.bias"]


@pytest.mark.watch
@pytest.mark.timeout(600)
def test_a_job_is_ended_on_request(tmp_path: Path) -> None:
    with watched_job(torchrun("--fault=opposite"), tmp_path, "--abort") as job:
        assert job.wait(PATIENCE) == 3, (tmp_path / "output.txt").read_text(errors="replace")


@pytest.mark.watch
@pytest.mark.timeout(600)
def test_a_job_that_runs_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is let in there, but a rank that is stopped is seen all the same, and said to whoever asks."""
    mark = tmp_path / "mark"
    output = tmp_path / "output.txt"
    job = subprocess.Popen(torchrun("--fault=stop", "--at=3", f"--mark={mark}"), stderr=subprocess.DEVNULL)
    try:
        wait_for(mark.exists, Path(__file__))
        command = [sys.executable, "-m", "lockstep", "watch", f"--folder={tmp_path / 'run'}", str(job.pid)]
        with open(output, "wb") as written:
            watch = subprocess.Popen(command, stderr=written)
        (event,) = wait_for(lambda: events_in(tmp_path), output)
        assert (event["kind"], event["cause"], event["culprit"]) == (ReportKind.VERDICT, Cause.FROZEN, "rank 1")
        capsys.readouterr()
        assert main(["why", "--json", event["job"]]) == 3
        assert json.loads(capsys.readouterr().out)["verdict"]["culprit"] == "rank 1"
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        for facts in descendants(job.pid):
            send_signal(facts.pid, signal.SIGKILL)
        job.kill()
        job.wait(PATIENCE)
