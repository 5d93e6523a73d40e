"""``lockstep why FOLDER`` on dumps of anybody's job: what it prints, and what it does with what is no dump."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flight.make_data import run_job
from flight.samples import TAKEN, copied
from helpers.programs import run_lockstep
from lockstep.diagnose.text import RULE, render
from lockstep.diagnose.verdict import read_diagnosis
from lockstep.flight.analysis import account_of
from lockstep.flight.diagnosis import diagnosis_of
from lockstep.flight.dump_folder import read_dump_folder
from lockstep.flight.recording import Recording

DOCUMENT = Path(__file__).parents[2] / "docs" / "when-a-job-hangs.md"


def said(name: str, folder: Path) -> str:
    return render("why", diagnosis_of(account_of(read_dump_folder(copied(name, folder)).recordings)))


def words(text: str) -> list[str]:
    return text.replace(RULE, "").split()


def test_the_document_shows_what_is_printed(tmp_path: Path) -> None:
    section = DOCUMENT.read_text().partition("## A job that is not Lockstep's")[2].partition("\n## ")[0]
    sample = section.split("```")[1].removeprefix("text\n")
    assert words(sample) == words(said("gloo-slept", tmp_path))


def test_the_command_reads_dumps_and_says_so(tmp_path: Path) -> None:
    folder = copied("gloo-order", tmp_path)
    finished = run_lockstep("why", str(folder), timeout=20)
    assert finished.code == 3, finished.stderr
    assert finished.stderr == ""
    first, lead = finished.stdout.splitlines()[:2]
    assert first.startswith(f"From the flight-recorder dumps of 3 ranks in {folder}, ")
    assert first.endswith(" old; nothing was asked.")
    assert lead.startswith(
        "Ranks 0 and 1 are waiting for one another in different groups. Rank 0 is in all_reduce 2 of "
    )
    assert "why: deadlock cycle" in finished.stdout


def test_as_json_it_is_a_report_like_any_other(tmp_path: Path) -> None:
    folder = copied("gloo-skipped", tmp_path)
    (folder / "trace_rank_7").write_bytes(b"\x80\x02cos\nsystem\n.")
    finished = run_lockstep("why", str(folder), "--json", timeout=20)
    assert finished.code == 3
    fields = json.loads(finished.stdout)
    assert fields.pop("problems") == [
        "trace_rank_7 is ignored: it is not readable: it has the instruction GLOBAL, which plain values do not need"
    ]
    assert fields.pop("folder") == str(folder)
    del fields["age_seconds"]
    verdict = read_diagnosis(json.dumps(fields).encode()).verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit) == ("ranks differ in a collective", "rank 1")


def test_a_healthy_job_has_exit_code_zero(tmp_path: Path) -> None:
    finished = run_lockstep("why", str(copied("gloo-healthy", tmp_path)), timeout=20)
    assert finished.code == 0
    assert "Nothing is stuck: in the dumps of 3 ranks every call has ended, or is about to." in finished.stdout
    assert "why: no collective is stuck" in finished.stdout


@pytest.mark.parametrize("content", [None, b"", b"not a dump", b"\x80\x02cos\nsystem\n.", b"{}"])
def test_a_folder_without_a_dump_is_bad_input(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "trace_rank_0").write_bytes(content)
    finished = run_lockstep("why", str(tmp_path), timeout=20)
    assert finished.code == 2
    assert finished.stdout == ""
    last = finished.stderr.splitlines()[-1]
    assert last == (
        f"lockstep: {tmp_path} has no readable report or snapshot, nor a dump of torch's flight recorder; give the "
        "folder that the job named at its end, or that of TORCH_FR_DUMP_TEMP_FILE."
    )
    named = [line for line in finished.stderr.splitlines()[:-1] if "trace_rank_0 is ignored: " in line]
    assert len(named) == len(finished.stderr.splitlines()) - 1 == (content not in (None, b"not a dump"))


def test_it_needs_no_torch(tmp_path: Path) -> None:
    folder = copied("gloo-slept", tmp_path)
    program = (
        "import sys; from lockstep.cli.main import main; code = main(); "
        "assert 'torch' not in sys.modules and 'grpc' not in sys.modules; sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "why", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 3, ran.stderr


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "gloo-skipped",
            [
                "Rank 1 has another operation than ranks 0 and 2 in all_gather 5 of the default group: all_reduce "
                "instead of all_gather.",
                "seen:     rank 1: all_reduce 5 of the default group ([4] Float) at train_step (job/train.py:",
            ],
        ),
        ("gloo-shape", ["in all_reduce 5 of the default group: [6] instead of [4]."]),
        (
            "gloo-dtype",
            [
                "in all_reduce 5 of the default group: Int instead of Float.",
                "seen:     nobody is in it any more: it failed, or ran all the same with wrong numbers",
            ],
        ),
        (
            "gloo-died",
            [
                "No call is open in the dumps, but rank 1 left none. Rank 1 left no dump: dead, frozen, or not able to "
                "write one.",
                "rank 1: left no dump",
            ],
        ),
        (
            "gloo-gave-up",
            ["The job has failed: ranks 0 and 2 gave up waiting for rank 1 in all_reduce 5 of the default"],
        ),
        ("gloo-wrapped", ["seen:     rank 1: its ring has wrapped, 13 earlier calls are gone"]),
        (
            "gloo-wrapped-group",
            [
                "Whether rank 1 should be in it cannot be told: the dumps do not say who belongs to that group, and "
                "rank 1 is in no call.",
                "seen:     rank 1: its ring has wrapped, 13 earlier calls are gone",
            ],
        ),
        ("nccl-one-rank-open", ["All of them are in it and none is done: it runs, or the collective itself is stuck."]),
        ("by-hand-nccl-2.3", ["rank 0 is waiting for rank 1 in all_reduce 5 of the default group."]),
    ],
)
def test_what_is_said_of_each_fault(name: str, lines: list[str], tmp_path: Path) -> None:
    text = said(name, tmp_path)
    for line in lines:
        assert line in text, text


def test_with_the_time_of_the_dumps_a_report_says_how_long(tmp_path: Path) -> None:
    recordings = read_dump_folder(copied("gloo-slept", tmp_path)).recordings
    began = max(call.created for call in recordings[0].calls)
    verdict = diagnosis_of(account_of(recordings), now=began + 12.5).verdict
    assert verdict is not None
    assert 12.0 < verdict.seconds < 14.0
    assert "culprit:  rank 1, for 12." in render("why", diagnosis_of(account_of(recordings), now=began + 12.5))


def test_many_ranks_stay_on_one_screen(tmp_path: Path) -> None:
    one = read_dump_folder(copied("by-hand-nccl-2.10", tmp_path)).recordings
    every = tuple(range(512))
    members = {"0": every}
    recordings = {
        rank: Recording(rank=rank, calls=one[0 if rank % 3 else 1].calls, members=members, taken=float(TAKEN))
        for rank in every
    }
    text = render("why", diagnosis_of(account_of(recordings)))
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 600
    assert "and 496 more" in text


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_the_installed_torch_still_writes_what_is_read(tmp_path: Path) -> None:
    run_job("skipped", tmp_path)
    read = read_dump_folder(tmp_path)
    assert sorted(read.recordings) == [0, 1, 2]
    difference = account_of(read.recordings).difference
    assert difference is not None
    assert difference.odd == (1,)
    assert os.listdir(tmp_path)


def test_without_sentences_the_same_ranks_are_found(tmp_path: Path) -> None:
    bare = str(Path(__file__).parents[1] / "bare")
    path = os.pathsep.join(filter(None, (bare, os.environ.get("PYTHONPATH", ""))))
    for name, cause in (
        ("gloo-slept", "never entered the collective"),
        ("gloo-order", "deadlock cycle"),
        ("gloo-shape", "ranks differ in a collective"),
        ("gloo-died", "unknown"),
    ):
        finished = run_lockstep(
            "why", str(copied(name, tmp_path)), "--json", timeout=20, environment={"PYTHONPATH": path}
        )
        verdict = json.loads(finished.stdout)["verdict"]
        assert (finished.code, verdict["cause"], verdict["culprit"]) == (3, cause, "ranks"), finished.stderr
