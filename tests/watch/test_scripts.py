"""Every fault of the catalogue in programs of others, with DDP and with FSDP2, three ranks over gloo, under torchrun:
the right word for each, and whose fault it is. The programs (``scripts/``) have the shape of what people run, and are
not changed: the fault comes from outside (``planting.py``). They take turns over the faults; ``LOCKSTEP_SCRIPTS=all``
runs every program with every fault."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.waiting import wait_until
from lockstep.drill.result import DrillStatus
from lockstep.drill.systems import SYSTEM_DRILLS, SYSTEMS, SystemDrill, events_in, run_planted, watched
from lockstep.protocol.core.causes import Cause, ReportKind
from watch.planting import FRAMEWORKS, SCRIPTS, Script, planted, python_for, script_for, torchrun

PATIENCE = 240.0
DRILLS = {drill.name: drill for drill in SYSTEM_DRILLS}
FAULTS = (
    "kill",
    "stop",
    "sleep",
    "lock",
    "loop",
    "gil",
    "loader",
    "skip",
    "other_shape",
    "other_dtype",
    "opposite",
    "exit",
    "slow",
    "always_slow",
)


def chosen(number: int, fault: str) -> list[Script]:
    if os.environ.get("LOCKSTEP_SCRIPTS") == "all":
        return [script for script in SCRIPTS if script.loads or fault != "loader"]
    return [script_for(number, fault)]


CASES = [
    pytest.param(DRILLS[fault], script, system, id=f"{fault}-{script.name}-{system}")
    for number, fault in enumerate(FAULTS)
    for place, system in enumerate(SYSTEMS)
    for script in chosen(number + place, fault)
]


def needs(script: Script) -> None:
    if script.frameworks and not os.environ.get(FRAMEWORKS) and importlib.util.find_spec("transformers") is None:
        pytest.skip(f"transformers is not installed here; {FRAMEWORKS} names no other environment")


@pytest.mark.watch
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("drill", "script", "system"), CASES)
def test_a_fault_in_an_unchanged_program_gets_the_right_word(
    drill: SystemDrill, script: Script, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(script)

    def command(mark: Path) -> list[str]:
        for name, value in planted(tmp_path / "planted", drill.name, mark).items():
            monkeypatch.setenv(name, value)
        return torchrun(script, system)

    result = run_planted(drill, f"{drill.name} {script.name} {system}", command, str(tmp_path))
    sys.stderr.write(f"{result.line()}\n")
    assert result.status is DrillStatus.PASSED, f"{result.reason}\n{result.report}"


@pytest.mark.watch
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "system"),
    [(script, system) for place, system in enumerate(SYSTEMS) for script in chosen(place, "never")],
)
def test_a_rank_that_never_starts(script: Script, system: str, tmp_path: Path) -> None:
    """Not under torchrun, which starts all of its ranks or none."""
    needs(script)
    launcher = [python_for(script), str(Path(__file__).with_name("two_of_three.py")), str(free_port())]
    with watched([*launcher, *script.command(system)], tmp_path):
        events = wait_until(lambda: events_in(tmp_path), PATIENCE, "something is said")
    text = (tmp_path / "output.txt").read_text(errors="replace")
    event = events[0]
    said = (event["kind"], event["cause"], event["culprit"])
    assert said == (ReportKind.NOTICE, Cause.NEVER_STARTED, "rank 1"), text
