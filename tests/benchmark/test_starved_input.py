"""A read that does not return, in a cluster on real files: ``why`` names the file, and the job goes on after it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cluster.tasks import Tasks
from helpers.programs import run_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import ClusterShape, worker
from lockstep.runtime.processes import become_subreaper

pytestmark = pytest.mark.timed

STUCK = "stuck.jpg"


def _picture(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 40, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


def _feed(fifo: Path) -> bool:
    """Give whoever reads the file a picture; False while nobody does."""
    try:
        writing = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(writing, "wb") as file:
        file.write(_picture(99))
    return True


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_why_names_the_file_that_a_step_waits_for_and_the_job_goes_on_once_it_comes(tmp_path: Path) -> None:
    become_subreaper()
    folder = tmp_path / "set" / "train" / "cat"
    folder.mkdir(parents=True)
    for number in range(11):
        (folder / f"{number}.jpg").write_bytes(_picture(number))
    os.mkfifo(folder / STUCK)
    # One epoch of 3 steps: the file that sticks is in exactly one of its batches.
    flags = ["--device=cpu", "--model=lenet", "--batch_size=2", "--num_threads=1", "--num_batches=3"]
    flags += ("--num_warmup_batches=0", f"--data_dir={tmp_path}/set", "--datasets_num_private_threads=1")
    tasks = Tasks(ClusterShape(1, 2), (*flags, "--nodatasets_use_prefetch"))

    def starved() -> dict[str, Any] | None:
        done = run_lockstep("why", tasks.addresses[worker(0)], "--json", timeout=30)
        verdict = json.loads(done.stdout)["verdict"] if done.stdout else None
        return verdict if verdict is not None and verdict["cause"] == "input starved" else None

    with contextlib.ExitStack() as closing:
        for task in tasks.shape.tasks():
            closing.enter_context(tasks.start(task))
        verdict = wait_until(starved, 90, "why says that a worker has no data")
        assert verdict is not None
        assert STUCK in verdict["what"]
        assert verdict["culprit"] in (str(worker(0)), str(worker(1)))
        wait_until(lambda: _feed(folder / STUCK), 30, "the picture is read")
        ends = tasks.finish(90)
    assert [end.code for end in ends.values()] == [0, 0, 0], ends
