"""What a report must name beside the cause and the task: a file, a process, a signal, an exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.drill.catalogue import find
from lockstep.drill.run import run_drill
from lockstep.runtime.monitor.oom import OomWitness, find_counters
from lockstep.runtime.processes import become_subreaper
from lockstep.runtime.watch.reporting import EVENTS

pytestmark = [pytest.mark.timed, pytest.mark.drill, pytest.mark.timeout(120)]


def said_in(name: str, folder: Path) -> str:
    """Run this drill; the sentences of all its notices and reports."""
    become_subreaper()
    result = run_drill(find(name), str(folder))
    assert result.status == "passed", result
    events = [json.loads(line) for line in (folder / name / EVENTS).read_text().splitlines()]
    return "\n".join([*(event["text"] for event in events if event["kind"] != "injected"), result.report])


def test_slow_input_is_named_with_its_file_its_rate_and_its_share_of_the_step(tmp_path: Path) -> None:
    said = said_in("input-slow", tmp_path)
    assert re.search(r"data-1/record-\d: (0\.\d+|1(\.\d)?) records per second, \d+% of this step", said)


def test_a_stopped_decoder_is_named_by_its_process_and_the_disk_is_not_blamed(tmp_path: Path) -> None:
    said = said_in("decoder-stopped", tmp_path)
    found = re.search(r"the process (\d+) that reads it is stopped", said)
    assert found is not None
    assert f"kill -CONT {found[1]}" in said
    assert "disk" not in said


def test_a_killed_decoder_is_named_with_its_signal_and_memory_only_if_it_was_that(tmp_path: Path) -> None:
    witness = OomWitness(find_counters(), 0.0)
    said = said_in("decoder-killed", tmp_path)
    assert re.search(r"input process \(pid \d+\) was killed by SIGKILL", said)
    assert ("probably for lack of memory" in said) == (witness.evidence() is not None)


def test_the_code_with_which_a_program_left_is_named(tmp_path: Path) -> None:
    assert "Worker 1 ended with exit code 5" in said_in("user-code-exits", tmp_path)


def test_a_program_without_descriptors_has_no_exit_code(tmp_path: Path) -> None:
    said = said_in("descriptors-closed", tmp_path)
    assert "runs, but has closed all its descriptors" in said
    assert "exit code" not in said
