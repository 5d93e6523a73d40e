"""``lockstep compare --program`` as a person uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.benchmark.compare.program_results import NAMES, TITLES
from lockstep.cli.compare_program import names_program, parse_program
from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime.compared import Shape

PROGRAM = Path(__file__).parents[1] / "helpers" / "compared_program.py"


def compare(folder: Path, *flags: str, how: str = "through") -> subprocess.CompletedProcess[str]:
    own = [f"--program={PROGRAM}", "--repeats=1", "--num_batches=4", "--num_warmup_batches=2", "--num_threads=1"]
    command = [sys.executable, "-m", "lockstep", "compare", *own, *flags, "--", str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_what_follows_the_dashes_is_the_programs() -> None:
    assert names_program(["--repeats=1", "--program=x.py"])
    assert not names_program(["--model=trivial", "--", "--program=x.py"])
    comparison = parse_program([f"--program={PROGRAM}", "--only=ddp,single", "--", "--lr=1", "--"]).comparison
    assert comparison.arguments == ("--lr=1", "--")
    assert comparison.shapes == (Shape.SINGLE, Shape.DDP)
    assert (comparison.servers, comparison.workers) == (1, 2)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--program=nowhere.py"], "--program=nowhere.py is not a file; give the path of a Python program."),
        (["--num_warmup_batches=0"], "--num_warmup_batches=0 is out of range; give 1 to"),
        (["--workers=0"], "--workers=0 is out of range; give 1 to 256."),
        (["--only=horovod"], "--only=horovod is not known; use one or more of these"),
        (["--run_timeout=0"], "--run_timeout=0 must be a number of seconds above 0"),
        (["--json=/proc/nope/x.json"], "--json=/proc/nope cannot be written to"),
        (["--model=trivial"], "there is no flag --model"),
        (["--batch_size=8"], "there is no flag --batch_size"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(flags: list[str], sentence: str) -> None:
    program = [] if flags[0].startswith("--program") else [f"--program={PROGRAM}"]
    with pytest.raises(BadInput) as refused:
        parse_program([*program, *flags])
    assert any(sentence in one for one in refused.value.sentences), refused.value.sentences


def test_help_is_that_of_programs() -> None:
    with pytest.raises(HelpAsked) as asked:
        parse_program(["--program", "--help"])
    assert "--num_warmup_batches=N" in asked.value.text


@pytest.mark.slow
def test_one_process_is_measured_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    done = compare(tmp_path, "--only=single", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(path.read_text())["shapes"]
    assert row["steps"][0]["steps"] == 4
    assert row["steps"][0]["step"] > row["steps"][0]["forward"] > 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(220)
def test_ddp_averages_in_the_same_program(tmp_path: Path) -> None:
    done = compare(tmp_path, "--only=ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "values-0").read_bytes() == (tmp_path / "values-1").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_a_program_that_goes_around_its_model_cannot_run_under_ddp(tmp_path: Path) -> None:
    done = compare(tmp_path, "--only=ddp", how="around")
    assert done.returncode == 1
    assert "only model(...) passes through DDP" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_servers_are_one_more_row(tmp_path: Path) -> None:
    done = compare(tmp_path, "--only=servers,limit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Lockstep, with servers" in done.stdout
    assert "of the limit" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_the_printed_parts_of_ranks_make_up_their_step(tmp_path: Path) -> None:
    done = compare(tmp_path, "--only=ranks")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    titles, ranks = rows[0], next(row for row in rows if row[0] == NAMES[Shape.RANKS])
    parts = [float(ranks[titles.index(title)]) for title in TITLES]
    whole = float(ranks[1].split()[0])
    assert parts[4] >= 0
    assert min(parts[:4]) > 0
    assert sum(parts) == pytest.approx(whole, abs=0.05)


def test_a_program_that_ends_too_early_is_told_so(tmp_path: Path) -> None:
    program = tmp_path / "short.py"
    program.write_text("print('done')\n")
    command = [sys.executable, "-m", "lockstep", "compare", f"--program={program}", "--only=single", "--repeats=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the program ended before its timed steps" in done.stdout
