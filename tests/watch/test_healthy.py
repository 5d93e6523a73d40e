"""2,000 healthy steps, in the middle of which rank 0 evaluates for a minute: a notice, and never a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.drill.systems import SYSTEMS, events_in, torchrun, watched
from lockstep.protocol.core.causes import ReportKind


@pytest.mark.watch
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("evaluation", ["compute", "socket"])
def test_a_long_evaluation_gets_no_verdict(evaluation: str, system: str, tmp_path: Path) -> None:
    command = torchrun(f"--kind={system}", "--steps=2000", "--at=1000", "--pause=0.002", f"--evaluate={evaluation}")
    with watched(command, tmp_path) as job:
        code = job.wait(800)
    output, events = (tmp_path / "output.txt").read_text(errors="replace"), events_in(tmp_path)
    assert code == 0, output
    assert {event["kind"] for event in events} <= {ReportKind.NOTICE}, output
    assert any("evaluate (" in event["text"] for event in events), output
