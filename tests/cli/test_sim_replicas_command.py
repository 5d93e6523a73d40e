"""``lockstep sim --server_replicas=1``."""

from __future__ import annotations

import json

import pytest

from lockstep.cli import sim
from lockstep.errors import BadInput


def test_every_kill_of_a_small_job_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.run(["--server_replicas=1", "--workers=1", "--steps=1", "--processes=1", "--json=-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["broken"] == []
    assert report["takeovers"] > 100
    # Servers that are lost for good before the job has formed end it.
    assert sum(report["endings"].values()) == report["runs"]
    assert report["endings"]["completed"] > 0.95 * report["runs"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--server_replicas=1", "--ps=1"], "give --ps=2 or more"),
        (["--server_replicas=2"], "must be a whole number from 1 to 1"),
        (["--server_replicas=1", "--fault=none"], "--fault does not apply to --server_replicas"),
        (["--kills=2", "--seeds=1"], "--kills applies to --server_replicas=1"),
    ],
)
def test_what_does_not_fit_is_refused(flags: list[str], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        sim.run(flags)
