"""2,000 healthy steps, in the middle of which rank 0 evaluates for a minute: a notice, and never a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.protocol.core.causes import ReportKind
from watch.running import WatchedJob, torchrun


@pytest.mark.watch
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("evaluation", ["compute", "socket"])
def test_a_long_evaluation_gets_no_verdict(evaluation: str, kind: str, tmp_path: Path) -> None:
    command = torchrun(f"--kind={kind}", "--steps=2000", "--at=1000", "--pause=0.002", f"--evaluate={evaluation}")
    with WatchedJob(tmp_path, command) as job:
        assert job.process.wait(800) == 0, job.text
        assert {event["kind"] for event in job.events()} <= {ReportKind.NOTICE}, job.text
        assert any("evaluate (" in event["text"] for event in job.events()), job.text
