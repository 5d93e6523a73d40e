"""Input that stands still, in a cluster on real files: what holds it up is named, and the job goes on after it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cluster.tasks import Tasks
from helpers.programs import run_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import HitReaders, to_text
from lockstep.protocol.core.ids import ClusterShape, worker
from lockstep.runtime.processes import become_subreaper, descendants

pytestmark = pytest.mark.timed

STUCK = "stuck.jpg"
FLAGS = (
    *("--device=cpu", "--model=lenet", "--batch_size=2", "--num_threads=1", "--num_warmup_batches=0"),
    *("--datasets_num_private_threads=1", "--nodatasets_use_prefetch"),
)


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


def _pictures(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(_picture(number))


def _verdict(tasks: Tasks) -> dict[str, Any] | None:
    done = run_lockstep("why", tasks.addresses[worker(0)], "--json", timeout=30)
    verdict = json.loads(done.stdout)["verdict"] if done.stdout else None
    return verdict if verdict is not None and verdict["cause"] == Cause.INPUT_STARVED else None


@contextlib.contextmanager
def _hit(tmp_path: Path, signum: int) -> Iterator[Tasks]:
    """A cluster in which worker 1's decoding processes get this signal in an early step."""
    become_subreaper()
    _pictures(tmp_path / "set" / "train" / "cat", 12)
    tasks = Tasks(ClusterShape(1, 2), (*FLAGS, "--num_batches=40", f"--data_dir={tmp_path}/set"))
    fault = to_text(HitReaders(str(worker(1)), 5, signum))
    with contextlib.ExitStack() as closing:
        for task in tasks.shape.tasks():
            closing.enter_context(tasks.start(task, environment={"LOCKSTEP_FAULTS": fault}))
        yield tasks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_stopped_decoder_is_named_and_the_job_goes_on_once_it_is_resumed(tmp_path: Path) -> None:
    with _hit(tmp_path, signal.SIGSTOP) as tasks:
        verdict = wait_until(lambda: _verdict(tasks), 90, "why says that a worker has no data")
        assert verdict is not None
        stopped = [facts.pid for facts in descendants(tasks.task_pid(worker(1))) if facts.stopped]
        assert verdict["culprit"] == str(worker(1))
        assert stopped
        assert verdict["remedy"].endswith(f"kill -CONT {' '.join(map(str, stopped))}")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        ends = tasks.finish(90)
    assert [end.code for end in ends.values()] == [0, 0, 0], ends


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_decoder_ends_the_job_and_is_named_with_its_signal(tmp_path: Path) -> None:
    with _hit(tmp_path, signal.SIGKILL) as tasks:
        ends = tasks.finish(120)
    assert all(end.code != 0 for end in ends.values()), ends
    assert all("was killed by SIGKILL" in end.stdout + end.stderr for end in ends.values()), ends


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_why_names_the_file_that_a_step_waits_for_and_the_job_goes_on_once_it_comes(tmp_path: Path) -> None:
    become_subreaper()
    folder = tmp_path / "set" / "train" / "cat"
    _pictures(folder, 11)
    os.mkfifo(folder / STUCK)
    # One epoch of 3 steps: the file that sticks is in exactly one of its batches.
    tasks = Tasks(ClusterShape(1, 2), (*FLAGS, "--num_batches=3", f"--data_dir={tmp_path}/set"))
    with contextlib.ExitStack() as closing:
        for task in tasks.shape.tasks():
            closing.enter_context(tasks.start(task))
        verdict = wait_until(lambda: _verdict(tasks), 90, "why says that a worker has no data")
        assert verdict is not None
        assert STUCK in verdict["what"]
        assert verdict["culprit"] in (str(worker(0)), str(worker(1)))
        wait_until(lambda: _feed(folder / STUCK), 30, "the picture is read")
        ends = tasks.finish(90)
    assert [end.code for end in ends.values()] == [0, 0, 0], ends
