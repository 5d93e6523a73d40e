"""``lockstep compare`` as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.benchmark.compare.contestants import ContestantKind
from lockstep.cli.compare_flags import has_matplotlib, parse_compare
from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime.host_network import why_not
from lockstep.runtime.startup.cluster import PROTOCOLS

SMALL = ["--model=trivial", "--batch_size=2", "--num_batches=3", "--num_warmup_batches=1", "--device=cpu"]


def compare(*flags: str, seconds: float = 100.0) -> subprocess.CompletedProcess[str]:
    given = {flag.partition("=")[0] for flag in flags}
    small = [flag for flag in SMALL if flag.partition("=")[0] not in given]
    command = [sys.executable, "-m", "lockstep", "compare", *small, "--num_threads=1", "--repeats=1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


def test_all_transports_are_measured_by_default() -> None:
    request = parse_compare(SMALL, {})
    ours = [c.protocol for c in request.comparison.contestants if c.kind is ContestantKind.LOCKSTEP]
    assert tuple(ours) == PROTOCOLS
    assert (request.comparison.servers, request.comparison.workers) == (1, 2)


def test_what_is_trained_is_passed_on() -> None:
    request = parse_compare([*SMALL, "--optimizer=adam", "--ps=2", "--workers=3", "--num_threads=4"], {})
    assert "--optimizer=adam" in request.comparison.bench_flags
    assert not any(flag.startswith(("--ps", "--workers", "--num_threads")) for flag in request.comparison.bench_flags)
    assert (request.comparison.servers, request.comparison.workers, request.comparison.threads) == (2, 3, 4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--repeats=0"], "--repeats=0 is out of range; give 1 to 100."),
        (["--run_timeout=-1"], "--run_timeout=-1 must be a number of seconds above 0"),
        (["--only=dpd"], "--only=dpd is not known; use one or more of these, separated by commas: limit, single, ddp"),
        (["--protocols=carrier"], "--protocols=carrier is not known; use one or more of these, separated by commas: "),
        (["--tf_cnn_benchmarks=nowhere"], "--tf_cnn_benchmarks=nowhere has no tf_cnn_benchmarks.py"),
        (["--tf_python=python9"], "--tf_python=python9 is not a program"),
        (["--only=tf_cnn"], "add --tf_cnn_benchmarks=FOLDER"),
        (["--hosts=moon"], "--hosts=moon is not known; the only kind of hosts is namespaces."),
        (["--only=ranks"], "--only=ranks is measured between hosts only; add --hosts=namespaces."),
        (["--json=/proc/nope/x.json"], "--json=/proc/nope cannot be written to"),
        (["--modle=x"], "did you mean --model?"),
        (["--model=nonsense"], "nonsense"),
        (["--job_name=ps"], "there is no flag --job_name"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(flags: list[str], sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_compare(flags, {})
    assert any(sentence in one for one in refused.value.sentences), refused.value.sentences


@pytest.mark.skipif(has_matplotlib(), reason="matplotlib is installed")
def test_a_picture_without_matplotlib_is_refused() -> None:
    with pytest.raises(BadInput, match="needs matplotlib"):
        parse_compare(["--plot=rates.png"], {})


def test_help_lists_both_kinds_of_flags() -> None:
    with pytest.raises(HelpAsked) as asked:
        parse_compare(["--help"], {})
    assert "--repeats=N" in asked.value.text
    assert "--batch_size=N" in asked.value.text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_limit_ddp_and_lockstep_are_measured_in_one_run(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    done = compare("--only=limit,ddp,lockstep", "--protocols=grpc", "--verbose", f"--json={path}", seconds=140.0)
    assert done.returncode == 0, done.stderr
    found = {row["kind"]: row for row in json.loads(path.read_text())["contestants"]}
    assert set(found) == {"limit", "ddp", "lockstep"}
    assert all(row["median"] > 0 for row in found.values())
    step = found["lockstep"]["step"]
    assert step["shares"]["computing"] > 0
    assert step["copies"]["bytes_in_place"] > step["copies"]["bytes_copied"] > 0
    assert step["links"][0]["sent"] > 0
    assert "Lockstep, grpc: a step is computing" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root")
def test_hosts_need_root() -> None:
    with pytest.raises(BadInput, match="network namespaces need root"):
        parse_compare([*SMALL, "--hosts=namespaces"], {})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_every_task_has_a_host_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    # Long enough for several readings of the processors.
    flags = ["--hosts=namespaces", "--only=ddp,beside,ranks", "--num_batches=200", f"--json={path}"]
    done = compare(*flags, seconds=200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["kind"]: row for row in json.loads(path.read_text())["contestants"]}
    assert set(found) == {"ddp", "beside", "ranks"}
    assert all(row["median"] > 0 and row["cpu_seconds_per_step"][0] > 0 for row in found.values())
    assert sum("shared memory" in line for line in found["beside"]["paths"]) == 2  # each with its own server
    assert sum("TCP to" in line for line in found["beside"]["paths"]) == 2
    assert all("TCP to" in line for line in found["ranks"]["paths"])
    assert "tf_cnn_benchmarks was not measured" in done.stdout


def test_a_run_that_takes_too_long_fails_and_says_so() -> None:
    done = compare("--only=single", "--run_timeout=0.1")
    assert done.returncode == 1
    assert "did not answer in time; give a longer --run_timeout" in done.stdout


DRAW = """
import sys
from pathlib import Path
from lockstep.cli.compare_plot import draw
from lockstep.benchmark.compare.contestants import Contestant, ContestantKind
from lockstep.benchmark.compare.results import Measurement, Row
limit = Row(Contestant(ContestantKind.LIMIT), [Measurement(10.0), Measurement(12.0)])
rows = [limit, Row(Contestant(ContestantKind.DDP))]
draw(rows, "two rounds", Path(sys.argv[1]))
"""


@pytest.mark.skipif(not has_matplotlib(), reason="matplotlib is not installed")
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "rates.png"
    # In a process of its own, as matplotlib keeps its fonts open.
    subprocess.run([sys.executable, "-c", DRAW, str(path)], check=True, timeout=60)
    assert path.read_bytes().startswith(b"\x89PNG")
