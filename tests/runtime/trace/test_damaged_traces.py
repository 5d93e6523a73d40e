"""A trace comes from a file that somebody names: whatever it holds, the end is a page or a sentence, and soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.trace import run
from lockstep.errors import BadInput
from lockstep.runtime.trace.page import trace_page


def trace(task: str, **changes: Any) -> dict[str, Any]:
    bar = {"ph": "X", "name": "step", "cat": "step", "pid": 1, "tid": 1, "ts": 5, "dur": 2, "args": {"step": 1}}
    name = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": task}}
    return {"traceEvents": [name, {**bar, **changes}], "lockstep": {"task": task, "wall_offset": 0.5}}


def merge(tmp_path: Path, first: Any, second: Any, target: str = "out.html") -> Path:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, content in zip(files, (first, second), strict=True):
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    run(["merge", str(tmp_path / target), *map(str, files)])
    return tmp_path / target


def test_two_traces_become_a_page(tmp_path: Path) -> None:
    assert merge(tmp_path, trace("a"), trace("b")).read_bytes().startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    "changes",
    [
        *({"ts": 1e17}, {"ts": -1e300}, {"dur": 1e17}, {"ts": "soon"}, {"ts": None}, {"pid": "x"}, {"tid": []}),
        *({"name": 3}, {"ph": "b"}, {"ph": None}, {"ph": "M", "args": {}}),
        {"ph": "b", "cat": "transfer", "id": "1", "args": {"peer": "p", "number": 1, "bucket": 2, "seen": {"a": "b"}}},
        {"ph": "b", "cat": "transfer", "id": "1", "args": {"peer": "p", "number": 1, "bucket": 2, "seen": 3}},
    ],
)
def test_numbers_and_texts_that_no_task_writes_are_a_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    """``ts=1e17`` drew an axis with 2e8 lines."""
    with pytest.raises(BadInput, match=r"b.json is not a trace of a Lockstep task; give files that --trace_file wrote"):
        merge(tmp_path, trace("a"), trace("b", **changes))
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, "NaN", "{}", "[]", '{"lockstep": 3}', "", '"\\ud800"'])
def test_what_is_no_trace_is_a_sentence(content: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a trace of a Lockstep task"):
        merge(tmp_path, content, trace("b"))


def test_an_axis_has_few_lines_however_long_the_trace_is() -> None:
    page = trace_page({"traceEvents": [{"ph": "X", "name": "s", "pid": 1, "tid": 1, "ts": 0, "dur": 1e15}]})
    assert page.count(b"<line") < 30
