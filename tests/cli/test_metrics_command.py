"""``lockstep metrics``: what it prints fits the metrics that there are, and so does the document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.metrics import FILES, shipped
from lockstep.runtime.monitor.exposition import MetricKind
from lockstep.runtime.monitor.task_metrics import FAMILIES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAME = re.compile(r"\blockstep_[a-z_]+")


def known_names() -> set[str]:
    parts = ("_bucket", "_sum", "_count")
    histograms = [one.name for one in FAMILIES if one.kind is MetricKind.HISTOGRAM]
    return {one.name for one in FAMILIES} | {f"{name}{part}" for name in histograms for part in parts}


@pytest.mark.parametrize("what", FILES)
def test_what_is_printed_uses_metrics_that_exist(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", what]) == 0
    printed = capsys.readouterr().out
    assert printed == shipped(FILES[what])
    assert set(NAME.findall(printed))
    assert set(NAME.findall(printed)) - known_names() == set()


def test_the_board_is_one_that_grafana_reads() -> None:
    board = json.loads(shipped(FILES["board"]))
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    assert all(panel["targets"] for panel in board["panels"])


def test_every_metric_and_every_alert_is_in_the_document() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)
    alerts = re.findall(r"alert: (\w+)", shipped(FILES["rules"]))
    assert sorted(rows) == sorted([*(one.name for one in FAMILIES), *alerts])


def test_names_follow_the_rules_of_prometheus() -> None:
    for one in FAMILIES:
        assert one.name.endswith("_total") == (one.kind is MetricKind.COUNTER), one.name
        assert one.meaning.endswith("."), one.name
        assert "\n" not in one.meaning


def test_the_token_is_of_the_key_and_of_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    tokens = []
    for digit in "ab":
        key.write_text(digit * 64)
        file = key.rename(tmp_path / digit)
        assert main(["metrics", "token", f"--key_file={file}"]) == 0
        tokens.append(capsys.readouterr().out.strip())
        key.touch(0o600)
    assert len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    assert "a" * 64 not in tokens


@pytest.mark.parametrize("words", [[], ["tokens"], ["rules", "board"]])
def test_anything_else_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", *words]) == 2
    assert "say what to print: 'lockstep metrics rules', 'board' or 'token'" in capsys.readouterr().err
