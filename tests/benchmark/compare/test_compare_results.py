"""What a comparison makes of its numbers."""

from __future__ import annotations

import json

import pytest

from lockstep.benchmark.compare.contestants import Contestant, ContestantKind, all_contestants
from lockstep.benchmark.compare.results import (
    Measurement,
    Row,
    StepDetail,
    as_json,
    detail_lines,
    ratios,
    spread,
    table,
)
from lockstep.runtime.trace.step_times import StepShares


def row(kind: ContestantKind, *rates: float, protocol: str = "") -> Row:
    return Row(Contestant(kind, protocol), [Measurement(rate) for rate in rates])


def test_ratios_are_taken_within_a_round() -> None:
    limit, ours = row(ContestantKind.LIMIT, 10.0, 100.0), row(ContestantKind.LOCKSTEP, 9.0, 95.0)
    assert ratios(ours, limit) == pytest.approx([0.9, 0.95])
    assert ratios(ours, None) == []


def test_a_round_without_a_number_gives_no_ratio() -> None:
    limit, ours = row(ContestantKind.LIMIT, 10.0, 100.0), row(ContestantKind.LOCKSTEP, 0.0, 95.0)
    assert ratios(ours, limit) == pytest.approx([0.95])


def test_spread_shows_median_and_extremes() -> None:
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert spread([3.0], 1) == "3.0"
    assert spread([], 1) == "-"


def test_table_compares_with_what_was_measured_only() -> None:
    lines = table([row(ContestantKind.LIMIT, 10.0), row(ContestantKind.LOCKSTEP, 9.0, protocol="grpc")])
    assert lines[0].split("|")[2:-1] == [" images/s ", " of the limit "]
    assert "Lockstep, grpc" in lines[3]
    assert "0.90" in lines[3]
    assert len({len(line) for line in lines}) == 1


def test_table_tells_a_failure_from_what_cannot_run_here() -> None:
    failed = Row(Contestant(ContestantKind.DDP), [Measurement(failure="ended with SIGKILL")])
    cannot = Row(Contestant(ContestantKind.LOCKSTEP, "grpc+verbs"), [Measurement(cannot="no RDMA device")])
    lines = table([failed, cannot])
    assert "failed" in lines[2]
    assert "cannot run here" in lines[3]
    assert (failed.failed, cannot.failed) == (True, False)
    assert cannot.trouble == "no RDMA device"


def test_details_say_where_a_step_goes() -> None:
    shares = StepShares(7, 0.010, 0.001, 0.002, 0.003, 0.004)
    detail = StepDetail(shares, 0.005, 0.006, {"steps": 7}, ({"path": "gRPC"},))
    ours = Row(Contestant(ContestantKind.LOCKSTEP, "grpc"), [Measurement(1.0, detail=detail)])
    text = " ".join(detail_lines(ours))
    assert "computing 10.00 ms" in text
    assert "reduce and update 3.00 ms" in text
    assert json.loads(json.dumps(as_json([ours], {"model": "x"})))["contestants"][0]["step"]["shares"]["steps"] == 7
    assert detail_lines(row(ContestantKind.DDP, 1.0)) == []


def test_everybody_is_asked_and_tf_cnn_only_where_it_is_given() -> None:
    kinds = [contestant.kind for contestant in all_contestants(("grpc", "grpc+shm"), with_tf_cnn=True, on_hosts=False)]
    assert kinds == [
        ContestantKind.LIMIT,
        ContestantKind.SINGLE,
        ContestantKind.DDP,
        ContestantKind.LOCKSTEP,
        ContestantKind.LOCKSTEP,
        ContestantKind.TF_CNN,
    ]
    assert ContestantKind.TF_CNN not in [
        contestant.kind for contestant in all_contestants(("grpc",), with_tf_cnn=False, on_hosts=False)
    ]


def test_between_hosts_the_ways_to_place_tasks_are_contestants_too() -> None:
    found = all_contestants(("auto",), with_tf_cnn=False, on_hosts=True)
    assert [contestant.name for contestant in found] == [
        "workers without communication (the limit)",
        "PyTorch DDP",
        "Lockstep, auto",
        "Lockstep, auto, a server beside each worker",
        "Lockstep, auto, every rank trains",
    ]


def test_processor_seconds_have_a_column_where_they_are_known() -> None:
    known = Row(Contestant(ContestantKind.DDP), [Measurement(5.0, processor_seconds=0.25)])
    failed = Row(Contestant(ContestantKind.LOCKSTEP, "grpc"), [Measurement(failure="gone")])
    lines = table([known, failed])
    assert "CPU s a step" in lines[0]
    assert "0.250" in lines[2]
    assert len({line.count("|") for line in lines}) == 1
    assert "CPU s a step" not in table([row(ContestantKind.DDP, 1.0)])[0]
