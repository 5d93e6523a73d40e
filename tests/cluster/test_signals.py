"""Signals to one task, or to all, as people and batch systems send them: who is told, how soon, and how all end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cluster.tasks import Tasks, any_case, tasks_of
from helpers.ports import free_port
from helpers.programs import Finished, start_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import CHIEF, ClusterShape, TaskId, server, worker
from lockstep.protocol.phrases import named
from lockstep.runtime.checkpoint.folder import CheckpointFolder, verify
from lockstep.transports.control.monitor_client import Unreachable, describe

SHAPE, PS, W1 = ClusterShape(1, 2), server(0), worker(1)
FOREVER = "--num_batches=1000000"
TOLD_SECONDS = 2.0
END_SECONDS = 8.0
"""For all to end after they were told, monitors and what they leave behind included."""
START_SECONDS = 90.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
pytestmark = [pytest.mark.timed, pytest.mark.timeout(150)]


@pytest.fixture
def slow_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which the import of torch does not end: a cold disk, for as long as a test needs it."""
    package = tmp_path / "slow" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\nwhile True: time.sleep(0.05)\n")
    return {"PYTHONPATH": str(package.parent), **ONE_THREAD}


def start_all(tasks: Tasks, environment: dict[str, str] | None = None) -> None:
    for task in tasks.shape.tasks():
        tasks.start(task, environment=environment or ONE_THREAD)


def training(tasks: Tasks) -> None:
    start_all(tasks)
    tasks.programs[CHIEF].wait_for("Done warm up", START_SECONDS)


def imports_torch(tasks: Tasks, task: TaskId, *, member: bool = True) -> bool:
    """Whether the task has made itself known, as a member of its job or not, and imports torch."""
    try:
        found = describe(tasks.addresses[task], 1.0)
    except Unreachable:
        return False
    known = bool(found.job if member else found.task_address)
    return known and found.phase == TaskPhase.IMPORTING_TORCH


def importing(tasks: Tasks, environment: dict[str, str]) -> None:
    """All tasks are members, and every one of them is in the import of torch."""
    start_all(tasks, environment)
    for task in tasks.shape.tasks():
        wait_until(partial(imports_torch, tasks, task), 30, f"{task} imports torch")


def told(tasks: Tasks, others: list[TaskId], sentence: str) -> None:
    """All of them say it, in time."""
    began = time.monotonic()
    for task in others:
        tasks.programs[task].wait_for(sentence, TOLD_SECONDS)
    assert time.monotonic() - began < TOLD_SECONDS


def all_end_with(tasks: Tasks, code: int, seconds: float = END_SECONDS) -> dict[TaskId, Finished]:
    ended = tasks.finish(seconds)
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(ended, code), ended
    assert not any("Traceback" in one.stderr or "verdict" in one.stderr for one in ended.values()), ended
    return ended


@pytest.mark.parametrize(
    ("signum", "victim", "words"),
    [
        (signal.SIGINT, W1, "received SIGINT (Ctrl-C)"),
        pytest.param(signal.SIGHUP, CHIEF, "received SIGHUP", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(signal.SIGINT, PS, "received SIGINT (Ctrl-C)", marks=pytest.mark.slow),
    ],
    ids=["ctrl-c", "hang-up", "ctrl-c of the server"],
)
def test_a_person_ends_the_job_on_every_task_at_once(signum: int, victim: TaskId, words: str) -> None:
    with tasks_of(SHAPE, FOREVER) as tasks:
        training(tasks)
        tasks.programs[victim].signal(signum)
        told(tasks, list(SHAPE.tasks()), f"{named(victim)} {words}")
        all_end_with(tasks, 128 + signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_the_same_in_the_middle_of_the_import_of_torch(signum: signal.Signals, slow_torch: dict[str, str]) -> None:
    with tasks_of(SHAPE, FOREVER) as tasks:
        importing(tasks, slow_torch)
        tasks.programs[W1].signal(signum)
        told(tasks, list(SHAPE.tasks()), f"{named(W1)} received {signum.name}")
        all_end_with(tasks, 128 + signum)


def test_the_same_while_the_cluster_forms(slow_torch: dict[str, str]) -> None:
    with tasks_of(SHAPE, FOREVER) as tasks:
        tasks.start(PS, environment=slow_torch)
        tasks.start(CHIEF, environment=slow_torch).wait_for("worker 0 to ps 0", 30)
        tasks.programs[CHIEF].signal(signal.SIGINT)
        told(tasks, [PS, CHIEF], f"{named(CHIEF)} received SIGINT (Ctrl-C)")
        all_end_with(tasks, 130)


def test_a_task_alone_ends_at_once(slow_torch: dict[str, str]) -> None:
    """Nobody is there to be told, and nothing is waited for: from the first moment on."""
    with tasks_of(SHAPE, FOREVER) as tasks:
        for signum in (signal.SIGINT, signal.SIGTERM):
            program = tasks.start(W1, environment=slow_torch)
            wait_until(lambda: tasks.task_pid(W1), 20, "the monitor has started its task")
            program.signal(signum)
            assert program.wait(END_SECONDS).code == 128 + signum


@pytest.mark.slow
def test_sigterm_of_one_worker_is_told_at_once_and_is_a_loss_when_the_others_stay() -> None:
    with tasks_of(SHAPE, FOREVER, "--on_worker_loss=shrink") as tasks:
        training(tasks)
        tasks.programs[W1].signal(signal.SIGTERM)
        told(tasks, [PS, CHIEF], f"{named(W1)} received SIGTERM and leaves")
        assert tasks.programs[W1].wait(12).code == 143
        for task in (PS, CHIEF):
            tasks.programs[task].wait_for("worker 1 is lost: it received SIGTERM and left; the job goes on", 5)
        assert tasks.programs[CHIEF].running()


@pytest.mark.slow
def test_sigterm_of_one_worker_ends_a_job_that_cannot_lose_one(slow_torch: dict[str, str]) -> None:
    with tasks_of(SHAPE, FOREVER, "--on_worker_loss=abort") as tasks:
        importing(tasks, slow_torch)
        tasks.programs[W1].signal(signal.SIGTERM)
        told(tasks, [PS, CHIEF], f"{named(W1)} received SIGTERM and leaves")
        assert tasks.programs[W1].wait(12).code == 143
        for task in (PS, CHIEF):
            tasks.programs[task].wait_for(f"{any_case(W1)} received SIGTERM and left", 5)


@pytest.mark.parametrize(
    "victims", [(W1, CHIEF, PS), pytest.param((PS,), marks=pytest.mark.slow)], ids=["all", "server 0"]
)
def test_sigterm_of_all_or_of_server_0_saves_what_was_trained(victims: tuple[TaskId, ...], tmp_path: Path) -> None:
    with tasks_of(SHAPE, FOREVER, "--on_worker_loss=abort", f"--train_dir={tmp_path}") as tasks:
        training(tasks)
        for victim in victims:
            tasks.programs[victim].signal(signal.SIGTERM)
        ended = all_end_with(tasks, 143, 20)
    (saved,) = CheckpointFolder(tmp_path).complete()
    version = verify(saved).version
    assert f"version {version} is saved" in ended[PS].stderr
    assert version >= 10  # the warm-up steps at least


@pytest.mark.slow
def test_a_checkpoint_that_takes_too_long_is_not_waited_for(slow_torch: dict[str, str], tmp_path: Path) -> None:
    """Nothing is trained, so the step cannot be finished: the grace is over soon, and everybody ends."""
    with tasks_of(SHAPE, FOREVER, "--grace=1", f"--train_dir={tmp_path}") as tasks:
        importing(tasks, slow_torch)
        tasks.programs[PS].signal(signal.SIGTERM)
        all_end_with(tasks, 143)


# -- workers without servers --


@pytest.fixture
def collective() -> Iterator[Tasks]:
    meeting = f"--collective_port={free_port()}"
    with tasks_of(ClusterShape(0, 3), FOREVER, "--variable_update=collective_all_reduce", meeting) as tasks:
        yield tasks


@pytest.mark.parametrize(
    ("signum", "victim"),
    [
        (signal.SIGINT, W1),
        pytest.param(signal.SIGHUP, CHIEF, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(signal.SIGTERM, CHIEF, marks=pytest.mark.slow),
    ],
    ids=["ctrl-c", "hang-up of the chief", "sigterm of the chief"],
)
def test_workers_without_servers_are_told_while_they_start(
    signum: signal.Signals, victim: TaskId, collective: Tasks, slow_torch: dict[str, str]
) -> None:
    importing(collective, slow_torch)
    collective.programs[victim].signal(signum)
    told(collective, list(collective.shape.tasks()), f"{named(victim)} received {signum.name}")
    all_end_with(collective, 128 + signum)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 3)])
def test_workers_without_servers_are_told_while_they_train(
    signum: signal.Signals, code: int, collective: Tasks
) -> None:
    training(collective)
    collective.programs[W1].signal(signum)
    told(collective, [CHIEF, worker(2)], f"{named(W1)} received {signum.name}")
    ended = collective.finish(12)
    assert {task: one.code for task, one in ended.items()} == {CHIEF: code, W1: 128 + signum, worker(2): code}


# -- a whole cluster on this machine --


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_local_cluster_ends_with_one_sentence(signum: signal.Signals, slow_torch: dict[str, str]) -> None:
    with start_lockstep(
        "bench", "--ps=1", "--workers=2", "--device=cpu", "--model=lenet", FOREVER, environment=slow_torch
    ) as program:
        program.wait_for("3 of 3 tasks are up", 30)
        before = program.stderr()
        program.signal(signum)
        ended = program.wait(END_SECONDS)
    assert ended.code == 128 + signum
    assert ended.stderr.removeprefix(before) == f"lockstep: {signum.name} ends the job on all 3 tasks\n"


# -- SIGUSR1 --


def test_sigusr1_to_the_process_that_a_person_started_writes_the_files_and_says_where(
    slow_torch: dict[str, str], tmp_path: Path
) -> None:
    with tasks_of(SHAPE, FOREVER, f"--train_dir={tmp_path / 'run'}") as tasks:
        program = tasks.start(W1, environment=slow_torch)
        wait_until(lambda: tasks.task_pid(W1), 20, "the monitor has started its task")
        program.signal(signal.SIGUSR1)
        program.wait_for("SIGUSR1", 20)  # the files, or that it came too early
        wait_until(partial(imports_torch, tasks, W1, member=False), 20, "worker 1 imports torch")
        program.signal(signal.SIGUSR1)
        path = tmp_path / "run" / "worker-1.snapshot.json"
        program.wait_for(f"SIGUSR1: the snapshot and the journal of {named(W1)} are in {path}", 5)
        assert path.exists()
        assert program.running()
