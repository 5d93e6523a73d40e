"""Drills with real processes: a handful always, the rest by ``make test-drills``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.programs import run_lockstep
from lockstep.drill.catalogue import DRILLS, find
from lockstep.drill.model import Drill
from lockstep.drill.run import run_drill
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.endings import NOTICED
from lockstep.runtime.processes import become_subreaper

QUICK = ("worker-killed",)
DOCUMENT = Path(__file__).parents[2] / "docs" / "drills.md"


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


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["worker-killed", "worker-frozen", "request-lost", "proxy-set"])
@pytest.mark.timed
def test_a_drill_is_explained_in_time_in_a_cluster_of_64_tasks(name: str) -> None:
    become_subreaper()
    result = run_drill(find(name).sized(2, 62))
    assert result.status == "passed", result


def test_the_catalogue_covers_every_cause_and_group() -> None:
    assert len(DRILLS) >= 25
    assert len({drill.name for drill in DRILLS}) == len(DRILLS)
    said = {drill.cause for drill in DRILLS}
    # Of other jobs; of calls: tests/library/test_talking.py; of a server's memory: tests/protocol/test_homed.py
    not_ours = {Cause.NOT_ENTERED, Cause.OTHER_CALL, Cause.HOMES_DIFFER}
    never_drilled = set(Cause) - said - {Cause.OUT_OF_MEMORY, Cause.NO_PATH, Cause.STOPPED, Cause.DRIFTED} - not_ours
    assert never_drilled == set(), (
        "an out-of-memory kill would hit the machine that runs the drills; a transport without a path is bad input; "
        "parameters drift apart only in a program with torch (tests/library/test_ranks.py)"
    )
    for drill in DRILLS:
        only_slower = drill.cause in NOTICED or drill.name == "late-worker"
        assert drill.kind is None or (drill.kind is ReportKind.NOTICE) == only_slower


def test_the_document_has_one_row_per_drill_and_marks_those_that_had_fooled_us() -> None:
    text = DOCUMENT.read_text()
    rows = [name for name in re.findall(r"^\| ([a-z-]+) \|", text, re.MULTILINE) if name != "drill"]
    assert sorted(rows) == sorted(drill.name for drill in DRILLS)
    marked = text.partition("## Faults that had fooled us")[2].partition("\n## ")[0]
    assert [drill.name for drill in DRILLS if drill.fooled and f"\n| {drill.name} |" not in marked] == []


@pytest.mark.slow
def test_the_command_lists_its_drills_and_explains_bad_names() -> None:
    listed = run_lockstep("drill", "--list", timeout=20)
    assert listed.code == 0
    assert len(listed.stdout.splitlines()) == len(DRILLS)
    marked = {line.split()[0] for line in listed.stdout.splitlines() if "had fooled us" in line}
    assert marked == {drill.name for drill in DRILLS if drill.fooled}
    for words, sentence in (
        (("drill", "worker-kiled"), "did you mean"),
        (("drill", "--never"), "'lockstep drill' has no flag '--never'"),
        (("drill", "--json"), "name a drill, or give --all"),
        (("drill", "worker-killed", "--fooled"), "none of the named drills had fooled us"),
        (("drill", "--keep"), "'--keep' needs a value"),
        (("drill", "--all=yes"), "'--all' takes no value"),
        (("drill", "worker-killed", "--workers=many"), "--workers=many must be a whole number from 1 to 120"),
        (("drill", "worker-killed", "--workers=1"), "'worker-killed' needs at least --ps=1 and --workers=2"),
    ):
        finished = run_lockstep(*words, timeout=20)
        assert finished.code == 2
        assert sentence in finished.stderr
        assert "Traceback" not in finished.stderr
