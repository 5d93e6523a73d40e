"""The command lines of the first and the third report, with real pictures, eight replicas a worker, and a late one.

The first one hung for hours: eight devices a worker and real data. The third did not start, because a peer was not up
yet. Models are small here, and replicas run on the CPU; every other flag is the reporter's.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cluster.tasks import Tasks
from helpers.programs import Finished, Program, run_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.processes import become_subreaper

pytestmark = [pytest.mark.timed, pytest.mark.slow, pytest.mark.timeout(300)]
LATE_SECONDS = 60.0
STEPS = 6
SMALL = ("--device=cpu", "--num_threads=1", f"--num_batches={STEPS}", "--num_warmup_batches=2", "--display_every=1")
ALARMS = ("verdict", "stall", "Traceback", "OS Error")


def _steps(end: Finished) -> list[int]:
    return [int(number) for number in re.findall(r"^(\d+)\timages/sec: ", end.stdout, re.MULTILINE)]


def _ended_well(end: Finished) -> None:
    assert end.code == 0, end.stderr
    assert not [word for word in ALARMS if word in end.stderr], end.stderr


def _third_report(pictures: Path, folder: Path) -> dict[str, Finished]:
    """Two servers, two workers; the first node starts index 1 of each, the second, a moment later, index 0."""
    flags: tuple[str, ...] = ("--model", "lenet", "--batch_size", "4", "--variable_update=distributed_replicated")
    flags += ("--cross_replica_sync=True", "--num_gpus", "1", f"--data_dir={pictures}", f"--train_dir={folder}", *SMALL)
    tasks = Tasks(ClusterShape(2, 2), flags)
    with contextlib.ExitStack() as closing:
        for task in (server(1), worker(1)):
            closing.enter_context(tasks.start(task))
        tasks.programs[worker(1)].wait_for("is waiting for server 0", 60)  # it names whom it misses
        for task in (server(0), worker(0)):
            closing.enter_context(tasks.start(task))
        return {task.short: end for task, end in tasks.finish(150).items()}


def _first_report(tasks: Tasks, late: Program) -> dict[str, Finished]:
    late.wait_for("Running warm up", 120)
    return {task.short: end for task, end in tasks.finish(150).items()}


@pytest.mark.long
def test_reports_1_and_3_train_on_pictures_with_8_replicas_and_a_worker_60_seconds_late(tmp_path: Path) -> None:
    become_subreaper()
    pictures, trained = tmp_path / "imagenet_data", tmp_path / "imagenet_train"
    made = run_lockstep("data", "sample", str(pictures), "--pictures=120", "--files=2", timeout=120)
    assert made.code == 0, made.stderr
    flags = ("--batch_size=2", "--model=lenet", "--variable_update=parameter_server", "--local_parameter_device=cpu")
    tasks = Tasks(ClusterShape(1, 2), (*flags, "--server_protocol", "grpc+ucx", *SMALL))
    of_workers = ("--num_gpus=8", f"--data_dir={pictures}/", f"--train_dir={trained}/")
    with contextlib.ExitStack() as closing:
        began = time.monotonic()
        closing.enter_context(tasks.start(server(0), environment={"CUDA_VISIBLE_DEVICES": ""}))
        early = closing.enter_context(tasks.start(worker(0), *of_workers))
        # While the first cluster waits for its late worker, the third report's runs from start to end.
        third = _third_report(pictures, tmp_path / "third")
        wait_until(lambda: time.monotonic() - began >= LATE_SECONDS, LATE_SECONDS + 1, "the worker is late")
        assert early.running()
        assert "worker 1" in early.stderr() + tasks.programs[server(0)].stderr()
        late = closing.enter_context(tasks.start(worker(1), *of_workers))
        first = _first_report(tasks, late)
    for end in (*first.values(), *third.values()):
        _ended_well(end)
    for ends in (first, third):
        for name in ("worker 0", "worker 1"):
            assert _steps(ends[name]) == list(range(1, STEPS + 1)), name
    assert first["worker 1"].stdout.count("/job:worker/replica:0/task:1/cpu:") == 8
    assert "Batch size:  32 global" in first["worker 0"].stdout
    assert "Dataset:     imagenet\n" in first["worker 0"].stdout
    assert "Variables:   distributed_replicated" in third["worker 0"].stdout
    for folder in (trained, tmp_path / "third"):
        assert load_file(folder / "final.safetensors")
