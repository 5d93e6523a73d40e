"""Real runs whose checkpoints were damaged: refused with a sentence and exit code 2, never begun anew in silence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.tasks import SMALL_RUN, tasks_of
from helpers.marks import others_long
from helpers.programs import Finished, run_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.runtime.checkpoint.folder import CheckpointFolder, read_manifest

TWO_AND_ONE = ClusterShape(2, 1)
RUN = ("--ps=1", "--workers=1", "--num_warmup_batches=0", "--save_model_steps=2")


def flip_a_bit_of_each(train_dir: Path) -> list[str]:
    """Damage all checkpoints that are there in a way that only reading every byte shows; their names."""
    found = CheckpointFolder(train_dir).complete()
    for path in found:
        with next(path.glob("shard-0-*")).open("r+b") as shard:
            shard.seek(-1, os.SEEK_END)
            last = shard.read(1)[0]
            shard.seek(-1, os.SEEK_END)
            shard.write(bytes([last ^ 1]))
    return [path.name for path in found]


def bench(train_dir: Path, *flags: str) -> Finished:
    return run_lockstep("bench", *SMALL_RUN, *RUN, f"--train_dir={train_dir}", *flags, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_over_damaged_checkpoints_only_is_refused_and_begins_anew_when_told_to(tmp_path: Path) -> None:
    assert bench(tmp_path, "--num_batches=6").code == 0
    names = flip_a_bit_of_each(tmp_path)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    done = bench(tmp_path, "--num_batches=8")
    assert done.code == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("[ps 0] lockstep: none of")]
    assert f"none of the {len(names)} checkpoints in {tmp_path / 'checkpoints'} can be used" in sentence
    assert "is damaged: the checksum of shard-0-of-1.safetensors does not match" in sentence
    assert "give another --train_dir, or start at step 0 with --from_scratch" in sentence
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before, (
        "a refused start changes nothing"
    )
    again = bench(tmp_path, "--num_batches=4", "--from_scratch")
    assert again.code == 0, again.stderr
    assert "Resuming" not in again.stdout
    folder = CheckpointFolder(tmp_path)
    assert read_manifest(folder.complete()[0]).version == 4
    assert sorted(path.name for path in (folder.path / "before-1" / "checkpoints").iterdir()) == sorted(names)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_coordinator_that_is_killed_goes_on_with_the_run_that_was_begun_from_scratch(tmp_path: Path) -> None:
    assert bench(tmp_path, "--num_batches=6").code == 0
    shape = ClusterShape(1, 1)
    flags = ("--num_warmup_batches=0", "--num_batches=200", "--save_model_steps=5", "--restarts=1", "--from_scratch")
    folder = CheckpointFolder(tmp_path)
    former = {path.name for path in folder.complete()}
    with tasks_of(shape, *flags, f"--train_dir={tmp_path}") as tasks:
        for task in shape.tasks():
            tasks.start(task)
        # Not those of the run before, which are still there while they are put away.
        wait_until(lambda: {path.name for path in folder.complete()} - former, 60, "a checkpoint of its own")
        assert (folder.path / "before-1").exists()
        os.kill(tasks.task_pid(server(0)), signal.SIGKILL)
        results = tasks.finish(60)
    assert {done.code for done in results.values()} == {0}, results
    assert "Resuming at step" in results[worker(0)].stdout
    assert results[server(0)].stderr.count("starting from scratch") == 1
    assert not (folder.path / "before-2").exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "victim", others_long([server(0), server(1)], [server(0)]), ids=lambda t: t.short.replace(" ", "")
)
def test_a_lost_server_does_not_send_everybody_back_to_step_0_over_damaged_checkpoints(
    victim: TaskId, tmp_path: Path
) -> None:
    flags = ("--num_batches=1000000", f"--train_dir={tmp_path}", "--save_model_steps=10", "--restarts=1")
    folder = CheckpointFolder(tmp_path)
    with tasks_of(TWO_AND_ONE, *flags) as tasks:
        for task in TWO_AND_ONE.tasks():
            tasks.start(task)
        wait_until(folder.complete, 60, "a checkpoint")
        coordinator = tasks.task_pid(server(0))
        os.kill(coordinator, signal.SIGSTOP)  # it writes no other one meanwhile
        flip_a_bit_of_each(tmp_path)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        if victim != server(0):
            os.kill(coordinator, signal.SIGCONT)
        results = tasks.finish(40)
    assert results[server(0)].code == 2, results
    assert "can be used" in results[server(0)].stderr
    assert "--from_scratch" in results[server(0)].stderr
    for task in (server(1), worker(0)):
        assert results[task].code, results
        assert "can be used: the newest, " in results[task].stderr, results
    assert "Resuming" not in results[worker(0)].stdout
    assert "Traceback" not in "".join(done.stderr for done in results.values())
