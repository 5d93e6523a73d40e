"""A checkpoint that is written slowly holds up the end of a job, and does not end it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.tasks import tasks_of
from lockstep.protocol.core.ids import ClusterShape, Role, server

pytestmark = [pytest.mark.timed, pytest.mark.slow]

SLOW_DISK = """
import hashlib, time, types
import lockstep.runtime.checkpoint.tensor_file as tensor_file

class Slow:
    def __init__(self):
        self._digest = hashlib.sha256()
        self.hexdigest = self._digest.hexdigest
    def update(self, piece):
        time.sleep(0.5)
        self._digest.update(piece)

tensor_file.hashlib = types.SimpleNamespace(sha256=Slow)
"""
"""Each piece of a file takes half a second."""


@pytest.mark.timeout(150)
def test_a_last_checkpoint_that_takes_longer_than_stall_after_is_noticed_and_finished(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    folder = tmp_path / "checkpoints"
    flags = ("--num_batches=30", "--num_warmup_batches=0", "--stall_after=3", f"--train_dir={folder}")
    with tasks_of(ClusterShape(1, 2), *flags) as tasks:
        for task in tasks.shape.tasks():
            tasks.start(task, environment={"PYTHONPATH": path} if task.role is Role.SERVER else None)
        ends = tasks.finish(120)
    assert [end.code for end in ends.values()] == [0, 0, 0], ends
    assert "is still writing its checkpoint" in ends[server(0)].stdout + ends[server(0)].stderr
    assert (folder / "final.safetensors").exists()
