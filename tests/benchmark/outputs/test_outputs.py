"""Files that a run leaves: metric logs, TensorBoard events, traces, the plan."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.runs import BASE, NoProgress
from helpers.programs import run_lockstep
from helpers.records import read_records
from lockstep.benchmark.outputs.event_file import EventFile
from lockstep.benchmark.training.run import run_single
from lockstep.cli.flags import parse_bench
from lockstep.cli.main import main
from lockstep.errors import BadInput
from lockstep.runtime.trace.merge import clock_offsets, merged
from lockstep.runtime.trace.page import trace_page

pytestmark = pytest.mark.timeout(120)


def _run(*flags: str) -> None:
    run_single(parse_bench([*BASE, "--num_batches=4", "--display_every=2", *flags], {}), lambda _line: None, NoProgress)


def test_the_metric_log_has_a_line_for_each_number(tmp_path: Path) -> None:
    _run(f"--benchmark_log_dir={tmp_path}", "--benchmark_test_id=mine", "--print_training_accuracy")
    lines = [json.loads(line) for line in (tmp_path / "metric.log").read_text().splitlines()]
    assert [line["name"] for line in lines] == [
        *("current_examples_per_sec", "top_1_accuracy", "top_5_accuracy") * 3,
        "average_examples_per_sec",
    ]
    assert [line["global_step"] for line in lines][-1] == 4
    assert set(lines[0]) == {"name", "value", "unit", "global_step", "timestamp", "extras"}
    facts = json.loads((tmp_path / "benchmark_run.log").read_text())
    assert facts["model_name"] == "lenet"
    assert facts["test_id"] == "mine"
    assert facts["dataset"] == {"name": "digits"}
    names = {parameter["name"] for parameter in facts["run_parameters"]}
    assert "run.batch_size" in names


def test_evaluations_reach_the_metric_log(tmp_path: Path) -> None:
    _run(f"--benchmark_log_dir={tmp_path}", "--eval_during_training_at_specified_steps=4", "--num_eval_batches=1")
    names = [json.loads(line)["name"] for line in (tmp_path / "metric.log").read_text().splitlines()]
    assert "eval_top_1_accuracy" in names
    assert "eval_average_examples_per_sec" in names


@pytest.mark.parametrize(
    ("verbosity", "kinds"), [(1, {"scalar"}), (2, {"scalar", "all"}), (3, {"scalar", "all", "each"})]
)
def test_tensorboard_reads_what_was_asked_for(verbosity: int, kinds: set[str], tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _run(f"--train_dir={tmp_path}", f"--summary_verbosity={verbosity}")
    seen = accumulators.EventAccumulator(str(tmp_path))
    seen.Reload()
    tags = seen.Tags()
    assert {"learning_rate", "total_loss", "images_per_sec"} <= set(tags["scalars"])
    assert [event.step for event in seen.Scalars("total_loss")] == [1, 2, 4]
    assert ("log_gradients" in tags["histograms"]) == ("all" in kinds)
    assert ("0.0.weight/gradients" in tags["histograms"]) == ("each" in kinds)
    assert bool(tags["images"]) == ("each" in kinds)


def test_summaries_come_as_often_as_asked(tmp_path: Path) -> None:
    def written(*flags: str) -> int:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        _run(f"--train_dir={folder}", "--summary_verbosity=1", *flags)
        (events,) = folder.glob("events*")
        return events.read_bytes().count(b"total_loss")

    assert written() == 3  # steps 1, 2 and 4 get a line
    assert written("--save_summaries_steps=2") == 2


def test_events_are_framed_records(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.scalars(3, {"zero": 0.0})
    file.histogram(3, "spread", np.array([1.0, 2.0, np.inf]))
    file.close()
    payloads = list(read_records(file.path))
    assert len(payloads) == 3
    assert b"brain.Event:2" in payloads[0]


def _events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_trace_shows_the_last_steps(tmp_path: Path) -> None:
    _run(f"--trace_file={tmp_path / 'trace.json'}", "--trace_steps=2")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = _events(trace, "X")
    assert {event["args"]["step"] for event in spans} == {2, 3}
    assert {event["name"] for event in spans} == {"input", "forward and backward", "update"}
    assert all(event["dur"] >= 0 for event in spans)


@pytest.mark.slow
def test_traces_of_three_tasks_merge_on_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_lockstep(
        *("bench", *BASE, "--ps=1", "--workers=2", "--num_batches=4", "--num_threads=1"),
        *(f"--trace_file={tmp_path / 'trace.json'}", f"--graph_file={tmp_path / 'plan.json'}"),
        timeout=110,
    )
    assert done.code == 0, done.stderr
    traces = sorted(str(path) for path in tmp_path.glob("trace-*.json"))
    assert [Path(name).name for name in traces] == ["trace-ps-0.json", "trace-worker-0.json", "trace-worker-1.json"]
    assert main(["trace", "merge", str(tmp_path / "all.json"), *traces]) == 0
    assert capsys.readouterr().out.count("according to tensors") == 3
    check_format(json.loads((tmp_path / "all.json").read_text()), processes=3)
    assert main(["trace", "merge", str(tmp_path / "all.html"), *traces]) == 0
    shown = (tmp_path / "all.html").read_text()
    for row in ("worker 0: training thread", "worker 1: transfers", "ps 0: updates"):
        assert f">{row}</text>" in shown
    for bar in ("forward and backward, step", "gradient 0", "parameter 0", "update bucket 0, step"):
        assert f"<title>{bar}" in shown
    xml.etree.ElementTree.fromstring(shown[shown.index("<svg") : shown.index("</svg>") + 6])
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {bucket["server"] for bucket in plan["buckets"]} == {"/job:ps/replica:0/task:0"}
    assert {name for bucket in plan["buckets"] for name in bucket["parameters"]} == {
        parameter["name"] for parameter in plan["parameters"]
    }


def check_format(trace: dict[str, Any], processes: int) -> None:
    """What the trace viewers need: known phases, times, and a pair of ends for each asynchronous event."""
    open_ends: dict[tuple[str, str], int] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in {"M", "X", "b", "e"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        key = (event["cat"], str(event.get("id")))
        if event["ph"] == "b":
            open_ends[key] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= open_ends.pop(key)
    assert not open_ends
    assert len({event["pid"] for event in trace["traceEvents"]}) == processes


def test_the_timeline_escapes_names_and_spreads_what_overlaps() -> None:
    def transfer(number: int, begin: int, end: int) -> list[dict[str, Any]]:
        common = {"cat": "transfer", "name": "gradient <b>", "pid": 1, "tid": 2, "id": str(number)}
        return [{**common, "ph": "b", "ts": begin}, {**common, "ph": "e", "ts": end}]

    trace = {"traceEvents": [*transfer(1, 0, 10), *transfer(2, 5, 15), *transfer(3, 12, 20)]}
    shown = trace_page(trace).decode()
    assert "<b>" not in shown
    tops = [int(top) for top in re.findall(r"<rect x='[\d.]+' y='(\d+)'", shown)]
    assert len(tops) == 3
    assert tops[0] == tops[2] != tops[1]


def _side(task: str, peer: str, seen: list[tuple[str, int, float]], wall: float = 0.0) -> dict[str, Any]:
    events = [
        {
            "ph": "b",
            "cat": "transfer",
            "ts": at * 1e6,
            "args": {"kind": "x", "peer": peer, "number": number, "bucket": 0, "seen": {what: at * 1e6}},
        }
        for what, number, at in seen
    ]
    return {"traceEvents": events, "lockstep": {"task": task, "wall_offset": wall}}


def test_clocks_that_differ_are_brought_together_by_tensors() -> None:
    # The worker's clock is 100 s ahead; each way takes 0.01 s or more.
    server = _side("ps", "worker", [("arrived", 0, 1.01), ("in flight", 1, 1.5), ("arrived", 1, 2.3)])
    worker = _side(
        "worker", "ps", [("in flight", 0, 101.0), ("arrived", 1, 101.51), ("in flight", 1, 102.0)], wall=55.0
    )
    offsets, by_tensors = clock_offsets([server, worker])
    assert offsets == [0.0, pytest.approx(-100.0)]
    assert by_tensors == [True, True]


def test_tasks_that_share_no_tensor_go_by_the_wall_clock() -> None:
    offsets, by_tensors = clock_offsets([_side("a", "", [], wall=5.0), _side("b", "", [], wall=7.5)])
    assert (offsets, by_tensors) == ([0.0, 2.5], [True, False])


def test_two_traces_of_one_task_are_refused() -> None:
    with pytest.raises(BadInput, match="two of the traces are from a"):
        merged([_side("a", "", []), _side("a", "", [])])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["split"], "there is no 'lockstep trace split'"),
        (["merge", "out", "one"], "at least two traces"),
        (["merge", "out", "no", "nor"], "cannot be read"),
        (["merge", "--fast", "a", "b"], "has no flag --fast"),
    ],
)
def test_bad_input_to_trace_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *words]) == 2
    assert sentence in capsys.readouterr().err
