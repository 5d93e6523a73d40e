"""``lockstep sim``: what it prints, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["sim", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_a_flag_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "lockstep sim --workers=1000 --ps=32 --steps=5" in out
    assert "lockstep sim --seeds=2000" in out


def test_the_time_of_a_step_is_told_by_part_and_by_growth(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workers", "4", "--ps", "2", "--steps", "2", "--model_mb", "4", "--bucket_mb", "1", "--processes", "1")
    code, out, _ = run(capsys, *words)
    assert code == 0
    for line in ("a step takes", "compute", "stragglers", "gradients", "update", "parameters"):
        assert line in out
    for axis in ("the workers", "the servers", "the adapters' rate"):
        assert f"how a step grows with {axis}" in out


def test_the_same_as_json_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, out, _ = run(capsys, "--workers=2", "--ps=1", "--model_mb=1", "--growth=no", f"--json={file}")
    assert code == 0
    assert out.startswith("2 workers, 1 servers")
    report = json.loads(file.read_text())
    assert report["measured"]["step_ms"] == pytest.approx(sum(report["measured"]["parts_ms"].values()))


def test_how_many_servers_are_needed_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workers=8", "--ps=search", "--model_mb=8", "--bucket_mb=1", "--compute_ms=5", "--processes=1")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "servers are enough for 8 workers on this network" in out


def test_a_picture_is_drawn_of_what_two_processes_measure(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    file = tmp_path / "steps.png"
    words = ("--workers=2", "--ps=1", "--steps=2", "--model_mb=1", "--processes=2", f"--plot={file}")
    # A process of its own: matplotlib keeps its fonts open, and a pool its tracker, as long as the process lives.
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "sim", *words], capture_output=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_more_servers_than_buckets_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--workers=2", "--ps=4", "--model_mb=2", "--bucket_mb=1", "--growth=no")
    assert "2 of the servers have no bucket" in out


def test_seeds_are_played_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seeds=6", "--workers=3", "--ps=2", "--processes=1")
    assert code == 0
    assert "6 runs of 3 workers and 2 servers, 3 steps each" in out
    assert "runs that broke a rule: 0" in out


def test_one_seed_tells_what_was_planted_and_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    fault = '{"fault": "Freeze", "task": "/job:worker/replica:0/task:1", "step": 1}'
    words = ("--seed=3", "--workers=2", "--ps=1", f"--fault={fault}", "--mishap=none")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "by a verdict: frozen, /job:worker/replica:0/task:1" in out
    code, out, _ = run(capsys, *words, "--json=-")
    assert json.loads(out)["cause"] == "frozen"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--wokers=3"], "did you mean"),
        (["--workers=0"], "--workers=0 must be a whole number from 1 to 100000."),
        (["--workers"], "--workers needs a value"),
        (["--ps=many", "--workers=2"], "--ps=many must be a whole number"),
        (["--seed=1", "--seeds=2"], "not both"),
        (["--seeds=2", "--gbit=10"], "--gbit applies to the time of a step"),
        (["--mishap=none", "--seeds=3"], "give its --seed too"),
        (["--seed=1", "--fault={"], "a fault must be a JSON object"),
        (["--seed=1", "--mishap=x"], "is not a mishap"),
        (
            ["--seed=1", '--fault={"fault": "Freeze", "task": "/job:worker/replica:0/task:99"}'],
            "is not in a cluster of",
        ),
        (["--model=resnet5"], "did you mean"),
        (["--growth=maybe", "--workers=2"], "must be 'yes' or 'no'"),
        (["--model=resnet50", "--model_mb=3"], "not both"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_the_picture_needs_matplotlib_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capsys, "--workers=2", "--plot=x.png")
    assert code == 2
    assert (
        "--plot needs matplotlib, which is not installed; install it with: pip install 'lockstep-torch[plot]'." in err
    )
