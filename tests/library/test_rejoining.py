"""Programs of one's own that are killed and started again: the job goes on, and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.marks import others_long
from helpers.once import lines_once
from helpers.programs import LOCKSTEP, Finished, Program
from helpers.waiting import wait_until
from library.test_join import ONE_THREAD, hosts
from lockstep.runtime.checkpoint.folder import CheckpointFolder
from lockstep.transports.control.monitor_client import describe, snapshot_fields

PROGRAM = (sys.executable, str(Path(__file__).with_name("lasting_program.py")))
SECONDS = 110.0
pytestmark = [pytest.mark.timed, pytest.mark.timeout(240), pytest.mark.slow]


class Cluster:
    """One server and two workers as processes."""

    def __init__(self, started: ExitStack, *flags: str, program: tuple[str, ...] = ()) -> None:
        self._started = started
        self._lists = hosts(1, 2)
        self._flags, self._program = flags, program
        self.addresses = self._lists[1].partition("=")[2].split(",")
        self.server = self._start((*LOCKSTEP, "ps", *self._lists, *flags))
        self.workers = [self.start_worker(index) for index in range(2)]

    def start_worker(self, index: int) -> Program:
        place = ("--job_name=worker", f"--task_index={index}")
        return self._start((*PROGRAM, *self._lists, *place, *self._flags, *self._program))

    def _start(self, command: tuple[str, ...]) -> Program:
        return self._started.enter_context(Program(command, ONE_THREAD))

    def finish(self) -> list[Finished]:
        return [one.wait(SECONDS) for one in (self.server, *self.workers)]


def results(finished: list[Finished]) -> list[str]:
    """What each worker ended with: digest of its model, and its rates."""
    found = [re.search(r"worker \d of \d: (.*)", one.stdout) for one in finished[1:]]
    return [match[1] if match is not None else "" for match in found]


def run(*program: str, flags: tuple[str, ...] = ()) -> list[Finished]:
    with ExitStack() as started:
        return Cluster(started, *flags, program=program).finish()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    def make() -> list[str]:
        finished = run()
        assert [one.code for one in finished] == [0, 0, 0], finished
        return results(finished)

    return lines_once(tmp_path_factory, "rejoining", make)


@pytest.mark.parametrize(
    "where", others_long(["1:3:early", "1:5:late", "0:8:early", "0:0:early", "1:11:late"], ["0:8:early"])
)
def test_a_killed_program_that_is_started_again_goes_on_with_the_same_bits(
    where: str, undisturbed: list[str], tmp_path: Path
) -> None:
    victim, step, when = where.split(":")
    with ExitStack() as started:
        cluster = Cluster(started, program=(f"--die={where}", f"--once={tmp_path / 'once'}"))
        dead = cluster.workers[int(victim)]
        assert dead.wait(SECONDS).code == -9
        cluster.workers[1 - int(victim)].wait_for("is lost: it was killed by SIGKILL", 10)
        cluster.workers[int(victim)] = cluster.start_worker(int(victim))
        finished = cluster.finish()
    assert [one.code for one in finished] == [0, 0, 0], finished
    assert results(finished) == undisturbed
    again = finished[1 + int(victim)]
    resumed = int(re.findall(r"step (\d+)\n", again.stdout)[0])
    # Early in a step, its state may not have left the process yet: then the step before is made again.
    assert resumed == int(step) or (when == "early" and resumed == int(step) - 1)
    if resumed:
        assert f"resumes at step {resumed}" in again.stderr
    assert "has come back as a new incarnation" in finished[2 - int(victim)].stderr


@pytest.mark.parametrize("where", ["1:5:late"])
def test_below_lockstep_run_a_launchers_lost_rank_comes_back_by_itself_with_the_same_bits(
    where: str, undisturbed: list[str], tmp_path: Path
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=3")
    program = (*LOCKSTEP, "run", "--", *PROGRAM, "--servers=1", f"--die={where}", f"--once={tmp_path / 'once'}")
    with Program((*torchrun, *program), ONE_THREAD) as launcher:
        done = launcher.wait(SECONDS)
    assert done.code == 0, done
    assert sorted(re.findall(r"worker \d of \d: (.*)", done.stdout)) == sorted(undisturbed)
    assert f"restarting /job:worker/replica:0/task:{where[0]} (1 of 3 restarts)" in done.stderr


def test_a_spare_below_lockstep_run_goes_on_for_a_killed_program_with_the_same_bits(
    undisturbed: list[str], tmp_path: Path
) -> None:
    with ExitStack() as started:
        lists, die = hosts(1, 2), ("--die=1:5:late", f"--once={tmp_path / 'once'}")
        run = (*LOCKSTEP, "run", "--spares=1", "--", *PROGRAM, *lists, "--job_name=worker", "--task_index=1", *die)
        lost = started.enter_context(Program(run, ONE_THREAD))
        lost.wait_for("1 spare waits for a task to be lost", 60)  # the job begins after it
        chief = (*PROGRAM, *lists, "--job_name=worker", "--task_index=0")
        others = [(*LOCKSTEP, "ps", *lists), chief]
        programs = [*(started.enter_context(Program(one, ONE_THREAD)) for one in others), lost]
        finished = [one.wait(SECONDS) for one in programs]
    assert [one.code for one in finished] == [0, 0, 0], finished
    assert results(finished) == undisturbed
    assert "a spare takes the place of /job:worker/replica:0/task:1 (pid " in finished[2].stderr


@pytest.mark.long
def test_a_program_lost_after_the_second_step_of_an_iteration_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    server, chief, other = run("--two", "--die=1:3:called", f"--once={tmp_path / 'once'}")
    assert other.code == -9
    assert (server.code, chief.code) == (1, 1)
    assert "it cannot rejoin: it was in the middle of an iteration of several steps" in chief.stderr


def test_a_program_lost_outside_of_its_loops_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    server, chief, other = run("--outside", "--die=1:3:early", f"--once={tmp_path / 'once'}")
    assert other.code == -9
    assert (server.code, chief.code) == (1, 1)
    assert "it cannot rejoin: it makes steps outside job.steps()" in chief.stderr
    assert "the loss of a worker ends this job: it makes steps outside job.steps()" in chief.stderr


def test_a_program_that_is_killed_after_it_has_closed_its_job_is_counted_as_done(tmp_path: Path) -> None:
    file = tmp_path / "go"
    with ExitStack() as started:
        cluster = Cluster(started, program=(f"--linger={file}",))
        cluster.workers[0].wait_for("worker 0 of 2", SECONDS)
        wait_until(lambda: describe(cluster.addresses[1], 5.0).phase == "finishing", 20, "the end of worker 1")
        cluster.workers[1].signal(signal.SIGKILL)
        assert cluster.workers[1].wait(20).code == -9
        file.touch()
        began = time.monotonic()
        finished = cluster.finish()
        assert time.monotonic() - began < 20
    assert [one.code for one in finished] == [0, 0, -9], finished


def test_a_job_that_was_killed_whole_resumes_with_the_same_bits(undisturbed: list[str], tmp_path: Path) -> None:
    flags = (f"--train_dir={tmp_path}", "--save_model_steps=2")
    with ExitStack() as started:
        cluster = Cluster(started, *flags, program=("--die=0:9:early", f"--once={tmp_path / 'once'}"))
        assert cluster.workers[0].wait(SECONDS).code == -9
        for one in (cluster.server, *cluster.workers):
            one.close()
    finished = run(flags=flags)
    assert [one.code for one in finished] == [0, 0, 0], finished
    # While a checkpoint is written, none is begun: on a slow machine the next may be of any version.
    assert 0 < int(re.findall(r"step (\d+)\n", finished[1].stdout)[0]) <= 9
    assert "the job starts from the checkpoint" in finished[0].stderr
    assert results(finished) == undisturbed


@pytest.mark.parametrize("where", ["1:7:early"])
def test_without_servers_and_below_lockstep_run_a_lost_rank_comes_back_beside_its_checkpoints(
    where: str, undisturbed: list[str], tmp_path: Path
) -> None:
    """With rank 0, what the ranks have said in calls is lost: then all go back to the newest checkpoint."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=2")
    kept = (f"--train_dir={tmp_path}", "--save_model_steps=2", f"--die={where}", f"--once={tmp_path / 'once'}")
    with Program((*torchrun, *LOCKSTEP, "run", "--", *PROGRAM, *kept), ONE_THREAD) as launcher:
        done = launcher.wait(SECONDS)
    assert done.code == 0, done
    # The mean that servers would make, and the chief's buffers.
    assert set(re.findall(r"worker \d of \d: (.*)", done.stdout)) == {undisturbed[0]}
    lost, other = (f"/job:worker/replica:0/task:{index}" for index in (where[0], "10"[int(where[0])]))
    assert f"restarting {lost} (1 of 3 restarts)" in done.stderr
    back = f"starting {other} again: its job goes back to the newest checkpoint" in done.stderr
    assert back == (where[0] == "0")
    assert ("has come back as a new incarnation" in done.stderr) == (where[0] == "1")
    assert "verdict" not in done.stderr
    assert CheckpointFolder(tmp_path).complete()


def test_below_lockstep_run_a_launchers_lost_server_takes_all_back_to_the_checkpoint_with_the_same_bits(
    undisturbed: list[str], tmp_path: Path
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=3")
    go = tmp_path / "go"
    kept = (f"--train_dir={tmp_path}", "--save_model_steps=2", f"--linger={go}")
    with Program((*torchrun, *LOCKSTEP, "run", "--", *PROGRAM, "--servers=1", *kept), ONE_THREAD) as launcher:
        said = launcher.wait_for("lockstep why ", SECONDS)
        cluster = snapshot_fields(said.partition("lockstep why ")[2].split()[0], "Monitor")["cluster"]
        assert isinstance(cluster, dict)
        launcher.wait_for("step 5\n", SECONDS)
        os.kill(describe(cluster["/job:ps/replica:0/task:0"], 5.0).pid, signal.SIGKILL)
        launcher.wait_for("starting /job:worker/replica:0/task:0 again", SECONDS)
        go.touch()
        done = launcher.wait(SECONDS)
    assert done.code == 0, done
    assert set(re.findall(r"worker \d of \d: (.*)", done.stdout)) == set(undisturbed)
    assert "restarting /job:ps/replica:0/task:0 (1 of 3 restarts)" in done.stderr
    assert "starting /job:worker/replica:0/task:1 again" in done.stderr
