"""One moment of a job as the page shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.faulty import FAULTY, Faulty, frozen
from helpers.snapshots import PS0, W0, W1, healthy
from lockstep.dashboard.frame import FrameMaker, Look, Mood
from lockstep.dashboard.helping_commands import helping_command
from lockstep.dashboard.simulated import SimulatedCluster
from lockstep.dashboard.sources import RunFolderFiles
from lockstep.dashboard.task_rows import Light
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.evidence import Evidence, Seen
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.errors import BadInput
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import Freeze
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.reach import Reach, Silence


def look(evidence: Evidence, now: float = 1.0) -> Look:
    return Look(evidence.tasks, analyse(evidence), now, 1000.0 + now)


def maker() -> FrameMaker:
    return FrameMaker("live", "127.0.0.1:4000")


@pytest.mark.parametrize("faulty", FAULTY, ids=[make.__name__ for _, make, _, _ in FAULTY])
def test_every_fault_has_a_frame_with_its_culprit_and_words(faulty: Faulty) -> None:
    evidence = faulty[1]().evidence()
    frame = maker().frame(look(evidence))
    verdict = analyse(evidence).verdict
    assert verdict is not None
    assert frame["verdict"]["cause"] == verdict.cause.value
    assert frame["verdict"]["remedy"] == verdict.remedy
    assert [row["culprit"] for row in frame["tasks"] if row["name"] == verdict.culprit] in ([True], [])
    assert frame["mood"] in (Mood.STUCK, Mood.WARNING, Mood.ENDED)
    json.dumps(frame, allow_nan=False)


def test_a_frozen_task_is_stopped_its_waiters_wait_and_the_command_resumes_it() -> None:
    frame = maker().frame(look(frozen().evidence()))
    lights = {row["name"]: row["light"] for row in frame["tasks"]}
    assert lights[str(W1)] == Light.STOPPED
    assert lights[str(W0)] == Light.WAITING
    assert frame["verdict"]["command"].endswith(f"kill -CONT {frame['verdict']['pid']}'")
    assert frame["log"][0]["cause"] == "frozen"
    assert frame["log"][0]["until"] is None


def test_rates_come_from_two_looks_and_what_was_found_is_closed_when_it_is_over() -> None:
    first, made = frozen(), maker()
    made.frame(look(first.evidence(), 1.0))
    later = healthy()
    for task in (PS0, W0, W1):
        later.task(task)["step"] = 20
        later.task(task)["learning"] = {"batch": 64, "loss": 2.5, "step": 20}
        for link in later.task(task)["links"]:
            link["sent"] += 4000
    frame = made.frame(look(later.evidence(), 3.0))
    assert frame["mood"] == Mood.HEALTHY
    assert frame["numbers"]["rate"] == pytest.approx(5.0)
    assert frame["numbers"]["examples"] == pytest.approx(320.0)
    assert frame["numbers"]["loss"] == 2.5
    assert frame["log"][0]["until"] == 1003.0
    assert frame["links"]["rate"] == sum(path["rate"] for path in frame["links"]["paths"]) > 0
    assert [point[3] for point in made.points] == [None, 2.5]


def test_when_nobody_answers_any_more_the_last_frame_stays() -> None:
    made, evidence = maker(), frozen().evidence()
    before = made.frame(look(evidence, 1.0))
    quiet = Silence(Reach.REFUSED, "nothing listens there")
    gone = {name: Seen(task=name, silence=quiet, monitor_silence=quiet) for name in evidence.tasks}
    for now in (2.0, 3.0):
        after = made.frame(Look(gone, Diagnosis(summary="nobody"), now, 1000.0 + now))
    assert (after["mood"], after["gone_since"], after["number"]) == (Mood.GONE, 1002.0, 3)
    assert after["verdict"] == before["verdict"]
    assert after["tasks"] == before["tasks"]


def test_the_last_steps_of_a_task_that_falls_silent_grow_older() -> None:
    made, cluster = maker(), healthy()
    cluster.task(W1)["spans"] = [{"part": "computing", "what": "computing, step 9", "begin": 0.5, "end": 0.3}]
    calm = cluster.evidence()
    made.frame(look(calm, 1.0))
    silent = {**calm.tasks, str(W1): replace(calm.tasks[str(W1)], view=None, silence=Silence(Reach.MUTE))}
    frame = made.frame(look(replace(calm, tasks=silent), 3.0))
    assert (frame["mood"], frame["numbers"]["answering"]) == (Mood.HEALTHY, 3), "it may be late once, on a busy host"
    frame = made.frame(look(replace(calm, tasks=silent), 9.0))
    assert (frame["mood"], frame["numbers"]["answering"]) == (Mood.PARTIAL, 2)
    (row,) = [row for row in frame["tasks"] if row["name"] == str(W1)]
    assert row["lives"] is False
    assert row["spans"][0][:3] == [0, 8.5, 8.3]


def test_what_a_task_says_stays_a_value() -> None:
    cluster = frozen()
    evil = "<script>alert(1)</script>'\"\u2028"
    cluster.task(PS0)["waits"][0].update(what=evil, state=evil, names=[evil])
    cluster.monitor(W1)["description"]["host"] = "x; rm -rf ~"
    frame = maker().frame(look(cluster.evidence()))
    assert "\u2028" not in json.dumps(frame, ensure_ascii=False)
    assert frame["verdict"]["command"].startswith("ssh 'x; rm -rf ~' ")


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.UNKNOWN])
def test_a_command_names_the_place_or_is_none(cause: Cause) -> None:
    verdict = Verdict(cause=cause, culprit=str(W1), host="node3", pid=42)
    there, here = (helping_command(verdict, "node3:4000", name) for name in ("node1", "node3"))
    assert here == there or f"ssh node3 '{here}'" == there
    assert not {"{", "}"} & set(there)


def test_the_files_of_a_run_give_the_same_page(tmp_path: Path) -> None:
    cluster = frozen()
    for task, name in ((PS0, "ps-0"), (W0, "worker-0")):
        (tmp_path / f"{name}.snapshot.json").write_text(json.dumps(cluster.task(task)))
    source = RunFolderFiles(tmp_path)
    frame = source.maker().frame(source.look())
    assert frame["source"] == {"kind": "files", "words": str(tmp_path)}
    assert frame["verdict"]["culprit"] == "worker 1"
    with pytest.raises(BadInput, match="no readable report or snapshot"):
        RunFolderFiles(tmp_path / "none")


def test_a_simulated_cluster_trains_and_a_planted_fault_becomes_its_verdict() -> None:
    source = SimulatedCluster(6, 1, [Freeze(str(worker(2)), 2)])
    made = source.maker()
    frame = made.frame(source.look())
    for second in range(1, 40):
        source.advance(second)
        frame = made.frame(replace(source.look(), now=float(second)))
        if frame["verdict"] is not None and frame["verdict"]["proven"]:
            break
    assert (frame["verdict"]["culprit"], frame["verdict"]["cause"]) == ("worker 2", "frozen")
    rows = {row["short"]: row for row in frame["tasks"]}
    assert rows["worker 1"]["parts"][0] > 0
    assert rows["worker 1"]["host"] == "node001"
    assert rows["worker 1"]["spans"][-1][1] > 1.0, "it waits, and the timeline shows it"
