"""Reports that did not come from the coordinator, or that make no sense, change nothing and end no thread."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from diagnose.faulty import frozen
from helpers.cluster import in_process_cluster
from helpers.waiting import wait_until
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.verdict import ReportError, read_diagnosis
from lockstep.drill.task import PlainStore
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.protocol.core.messages import Printed, Report
from lockstep.runtime.watch.watchdog import Watchdog

FROZEN = json.loads(analyse(frozen().evidence()).to_json())


def _changed(**fields: Any) -> bytes:
    return json.dumps({**FROZEN, **fields}).encode()


WRONG = {
    "seconds of a verdict": _changed(verdict={**FROZEN["verdict"], "seconds": "long"}),
    "step of a verdict": _changed(verdict={**FROZEN["verdict"], "step": None}),
    "pid of a verdict": _changed(verdict={**FROZEN["verdict"], "pid": True}),
    "culprit of a verdict": _changed(verdict={**FROZEN["verdict"], "culprit": 7}),
    "seconds of a wait": _changed(causes=[{**FROZEN["causes"][0], "seconds": "long"}]),
    "step of a task": _changed(tasks=[{**FROZEN["tasks"][0], "step": "three"}]),
    "time of the report": _changed(time="noon"),
    "begin of a span": _changed(timeline=[{"task": "t", "part": None, "what": "w", "begin": "b", "end": 1.0}]),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_a_report_with_a_text_where_a_number_belongs_is_damaged(data: bytes) -> None:
    with pytest.raises(ReportError):
        read_diagnosis(data)


def test_a_report_as_it_is_written_can_be_read() -> None:
    assert read_diagnosis(json.dumps(FROZEN).encode()).verdict is not None


def test_the_watchdog_outlives_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: one Report with a text where a number belongs ended the thread that notices hangs."""
    with in_process_cluster(ClusterShape(1, 1), PlainStore, run_folder=str(tmp_path)) as cluster:
        node = cluster.workers[0]
        watchdog = next(one for one in threading.enumerate() if one.name == f"watchdog {node.task.short}")
        for data in WRONG.values():
            assert node.links.report_received(server(0), Report(ReportKind.VERDICT, "", data))
        wait_until(lambda: sum("report" in line for line in cluster.said) >= len(WRONG), 10.0, "every report was read")

        def fail(_watchdog: Watchdog, _message: Report) -> None:
            raise TypeError("whatever a reader did not foresee")

        monkeypatch.setattr(Watchdog, "_told", fail)
        node.links.report_received(server(0), Report(ReportKind.VERDICT, "", _changed()))
        wait_until(lambda: any("did not foresee" in line for line in cluster.said), 10.0, "the error was said")
        assert watchdog.is_alive()


def test_a_report_of_another_task_than_the_coordinator_is_not_heard(tmp_path: Path) -> None:
    with in_process_cluster(ClusterShape(1, 2), PlainStore, run_folder=str(tmp_path)) as cluster:
        for node in cluster.nodes():
            for forged in (Report(ReportKind.VERDICT, "", _changed()), Printed(ReportKind.VERDICT, str(worker(0)))):
                assert not node.links.report_received(worker(1), forged)
        assert not any("worker 1" in line and "stopped" in line for line in cluster.said)
