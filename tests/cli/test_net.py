"""``lockstep net``: its command line, and a short measurement with real processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import net
from lockstep.errors import BadInput
from lockstep.transports.net.measured import Measured, MeasurementReport

BAD = {
    "--pigeon": "'--pigeon' is not understood",
    "--rounds=0": "--rounds=0 must be a whole number above 0",
    "--min_size=x": "--min_size=x must be a whole number",
    "--min_size=8192 --max_size=4096": "--min_size must not be above --max_size",
    "--max_size=2147483648": "not above 1073741824",
    "a:1 b:2": "takes one address",
    "host": "has no port",
    "--serve a:1": "--serve and an address exclude each other",
}


@pytest.mark.parametrize("line", BAD)
def test_wrong_input_is_one_sentence(line: str) -> None:
    with pytest.raises(BadInput, match=BAD[line].replace("(", r"\(")) as caught:
        net.parse(line.split())
    assert len(caught.value.sentences) == 1


def test_a_plot_without_matplotlib_names_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'lockstep-torch\[plot\]'"):
        net.parse(["--plot=x.png"])


def test_nobody_who_serves_is_told_with_the_remedy() -> None:
    command = [sys.executable, "-m", "lockstep", "net", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("lockstep: nothing answers at 127.0.0.1:1")
    assert "lockstep net --serve" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_short_run_measures_every_path_and_its_limit(tmp_path: Path) -> None:
    target = tmp_path / "net.json"
    command = [sys.executable, "-m", "lockstep", "net", "--max_size=65536", "--min_size=16384", "--rounds=1"]
    done = subprocess.run([*command, f"--json={target}"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    names = {row["contender"] for row in found["rows"]}
    assert {"memory copy", "TCP socket", "bare grpcio", "grpc", "grpc+shm", "grpc+shm lend"} <= names
    assert all(row["gigabytes_per_second"] > 0 and row["p50_microseconds"] > 0 for row in found["rows"])
    assert {row["bytes"] for row in found["rows"]} == {16384, 65536}
    assert "how close to the limits:" in done.stdout
    assert "grpc+shm / memory copy" in done.stdout


def test_ratios_are_taken_at_the_largest_size_that_both_have() -> None:
    report = MeasurementReport("a", "b")
    report.rows = [
        Measured("p", 10, [4.0, 1.0, 9.0]),
        Measured("q", 10, [8.0, 8.0, 8.0]),
        Measured("p", 20, [1.0]),
    ]
    (ratio,) = report.ratios([("p", "q"), ("p", "r")])
    assert (ratio.nbytes, ratio.value) == (10, 0.5)


def test_percentiles_and_cpu() -> None:
    row = Measured("p", 10, [1.0], [0.1 * i for i in range(1, 101)], cpu_seconds=2.0, moved=10**9)
    assert row.latency(0.5) == pytest.approx(5.1)
    assert row.latency(0.99) == pytest.approx(10.0)
    assert row.cpu_per_gigabyte == 2.0
    assert Measured("p", 10).latency(0.5) == 0.0


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an optional extra")
def test_the_plot_is_a_png(tmp_path: Path) -> None:
    # In a process of its own: matplotlib keeps its fonts open.
    code = (
        "import sys; from lockstep.cli.net_plot import draw; from lockstep.transports.net.measured import *\n"
        "report = MeasurementReport('a', 'b')\n"
        "report.rows = [Measured('grpc', 4096, [1e9], [1e-4]), Measured('TCP socket', 4096, [2e9], [5e-5])]\n"
        "draw(report, sys.argv[1])\n"
    )
    target = tmp_path / "x.png"
    subprocess.run([sys.executable, "-c", code, str(target)], timeout=50, check=True)
    assert target.read_bytes().startswith(b"\x89PNG")
