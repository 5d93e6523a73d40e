"""Drills with real processes: a handful always, the rest by ``make test-drills``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.programs import run_lockstep
from lockstep.drill.catalogue import DRILLS, find
from lockstep.drill.model import Drill
from lockstep.drill.run import run_drill
from lockstep.protocol.core.causes import WARNINGS, Cause, ReportKind
from lockstep.runtime.processes import become_subreaper

QUICK = ("worker-killed",)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.timed
def test_a_drill_is_explained_in_time(name: str, tmp_path: Path) -> None:
    become_subreaper()
    result = run_drill(find(name), str(tmp_path))
    assert result.status == "passed", result
    folder = tmp_path / name
    assert result.culprit in (folder / "report.txt").read_text()
    assert json.loads((folder / "report.json").read_text())["verdict"]["cause"] == result.cause
    assert b"<svg" in (folder / "report.html").read_bytes()
    assert list(folder.glob("*.snapshot.json"))


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.parametrize("drill", [d for d in DRILLS if d.name not in QUICK], ids=lambda d: d.name)
@pytest.mark.timed
def test_every_drill_is_explained_in_time(drill: Drill) -> None:
    become_subreaper()
    result = run_drill(drill)
    if result.status == "skipped":
        pytest.skip(result.reason)
    assert result.status == "passed", result


def test_the_catalogue_covers_the_reports_and_the_groups() -> None:
    assert len(DRILLS) >= 25
    assert len({drill.name for drill in DRILLS}) == len(DRILLS)
    for number in (1, 2, 3):
        assert any(drill.story.startswith(f"report {number}:") for drill in DRILLS)
    said = {drill.cause for drill in DRILLS}
    never_drilled = set(Cause) - said - {Cause.OUT_OF_MEMORY, Cause.NO_PATH, Cause.STOPPED}
    assert never_drilled == set(), (
        "an out-of-memory kill would hit the machine that runs the drills; a transport without a path is bad input"
    )
    for drill in DRILLS:
        only_slower = drill.cause in WARNINGS or drill.name == "late-worker"
        assert drill.kind is None or (drill.kind is ReportKind.NOTICE) == only_slower


def test_the_command_lists_its_drills_and_explains_bad_names() -> None:
    listed = run_lockstep("drill", "--list", timeout=20)
    assert listed.code == 0
    assert len(listed.stdout.splitlines()) == len(DRILLS)
    for words, sentence in (
        (("drill", "worker-kiled"), "did you mean"),
        (("drill", "--never"), "there is no flag '--never'"),
        (("drill", "--json"), "name a drill, or give --all"),
    ):
        finished = run_lockstep(*words, timeout=20)
        assert finished.code == 2
        assert sentence in finished.stderr
        assert "Traceback" not in finished.stderr
