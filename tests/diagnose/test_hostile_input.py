"""Snapshots and reports come from peers and from files: whatever they hold, the answer is a sentence or a view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.faulty import frozen
from helpers.snapshots import PS0, W0, healthy
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.evidence import Evidence, Seen
from lockstep.diagnose.fields import FORMAT, SnapshotError
from lockstep.diagnose.files import evidence_of, read_folder
from lockstep.diagnose.monitor_view import read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.text import render
from lockstep.diagnose.verdict import ReportError, read_diagnosis

ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**64, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)
FIELDS = tuple(healthy().task(W0))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_snapshot_become_a_sentence(data: bytes) -> None:
    for read in (read_task, read_monitor):
        with pytest.raises(SnapshotError):
            read(data)
    with pytest.raises(ReportError):
        read_diagnosis(data)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, min_size=1, max_size=4))
def test_a_snapshot_with_fields_of_wrong_types_never_breaks_the_analysis(changes: dict[str, Any]) -> None:
    fields = {**healthy().task(W0), **changes, "format": FORMAT, "kind": "task", "task": str(W0)}
    view = read_task(json.dumps(fields).encode())
    monitor = read_monitor(json.dumps(healthy().monitor(W0)).encode())
    analyse(Evidence(tasks={str(W0): Seen(task=str(W0), view=view, monitor=monitor)}, floor=0.0)).to_json()


@settings(max_examples=100)
@given(ANY_JSON)
def test_a_report_that_is_some_other_json_becomes_a_sentence(value: Any) -> None:
    with pytest.raises(ReportError):
        read_diagnosis(json.dumps(value).encode())
    if isinstance(value, dict):
        with pytest.raises(ReportError):
            read_diagnosis(json.dumps({"format": 1, **value}).encode())


def test_deeply_nested_json_becomes_a_sentence() -> None:
    deep = b"[" * 100_000
    with pytest.raises(SnapshotError, match="not JSON"):
        read_task(deep)
    with pytest.raises(ReportError, match="not JSON"):
        read_diagnosis(deep)


def test_another_version_is_named() -> None:
    fields = {**healthy().task(W0), "format": 99}
    with pytest.raises(SnapshotError, match="comes from another version; this program reads format 2"):
        read_task(json.dumps(fields).encode())
    with pytest.raises(ReportError, match="from another version of the program"):
        read_diagnosis(b'{"format": 2}')


def test_a_snapshot_that_is_too_large_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.diagnose.fields.MAX_BYTES", 10)
    with pytest.raises(SnapshotError, match="at most 10 bytes; this one has 11"):
        read_task(b"x" * 11)


def test_a_folder_with_damaged_files_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    cluster = frozen()
    (tmp_path / "ps-0.snapshot.json").write_text(json.dumps(cluster.task(PS0)))
    (tmp_path / "worker-0.snapshot.json").write_text(json.dumps(cluster.task(W0))[:100])
    (tmp_path / "worker-1.snapshot.json").write_bytes(bytes(range(256)))
    (tmp_path / "report.json").write_text('{"format": 1, "verdict": {"cause": "magic"}}')
    found = read_folder(tmp_path)
    assert list(found.views) == [str(PS0)]
    assert found.report is None
    assert [problem.split(" is ignored: ")[0] for problem in found.problems] == [
        "worker-0.snapshot.json",
        "worker-1.snapshot.json",
        "report.json",
    ]
    diagnosis = analyse(evidence_of(found))
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.pair() == {str(PS0), "/job:worker/replica:0/task:1"}


def test_a_folder_that_is_a_directory_of_directories_gives_sentences(tmp_path: Path) -> None:
    (tmp_path / "ps-0.snapshot.json").mkdir()
    assert read_folder(tmp_path).problems == ["ps-0.snapshot.json is ignored: Is a directory"]


ESCAPES = "\x1b]0;owned\x07\x1b[2Jfine\nlockstep: all is well\u202e"


def test_no_text_of_a_snapshot_reaches_a_terminal_as_it_was() -> None:
    fields = spoilt({**healthy().task(W0), "format": FORMAT, "kind": "task"})
    monitor = spoilt(healthy().monitor(W0))
    seen = Seen(
        task=str(W0), view=read_task(json.dumps(fields).encode()), monitor=read_monitor(json.dumps(monitor).encode())
    )
    shown = repr(seen)
    assert "\\x1b" not in shown
    assert "\\n" not in shown
    assert "?[2Jfine lockstep: all is well?" in shown


def test_no_text_of_a_report_reaches_a_terminal_as_it_was() -> None:
    fields = spoilt(analyse(frozen().evidence()).to_fields())
    report = read_diagnosis(json.dumps(fields).encode())
    text = render("verdict", report)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "?[2Jfine lockstep: all is well?" in text


def spoilt(value: Any, name: str = "") -> Any:
    """The same with a hostile end of every text that is not a word of ours."""
    if isinstance(value, dict):
        return {key: spoilt(inner, key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [spoilt(inner, name) for inner in value]
    words = ("format", "kind", "cause", "part", "source", "answer", "refusal", "doing", "where")
    return f"{value}{ESCAPES}" if isinstance(value, str) and name not in words else value


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_arithmetic_chokes_on_makes_it_unreadable(number: str) -> None:
    fields = json.dumps({**healthy().task(W0), "pid": 12345678}).replace("12345678", number)
    with pytest.raises(SnapshotError):
        read_task(fields.encode())
    report = json.dumps({**analyse(frozen().evidence()).to_fields(), "time": 12345678}).replace("12345678", number)
    with pytest.raises(ReportError):
        read_diagnosis(report.encode())
