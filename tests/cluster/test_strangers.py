"""The key of a running job: where it is not, and what those are told who have another one or none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cluster.tasks import tasks_of
from helpers.keys import make_key, no_key
from helpers.ports import free_range
from helpers.programs import run_lockstep
from helpers.waiting import wait_until
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.runtime.processes import descendants
from lockstep.security.chosen import chosen_key
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_snapshot, fetch_stack

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]
SHAPE = ClusterShape(1, 2)
START_SECONDS = 60.0


@contextmanager
def running(folder: Path) -> Iterator[DrillCluster]:
    with DrillCluster(SHAPE, folder) as cluster:
        for task in SHAPE.tasks():
            cluster.start(cluster.plan(task, steps=100_000))
        wait_until(lambda: _step(cluster, worker(1)) > 3, START_SECONDS, "the job trains")
        yield cluster


def _step(cluster: DrillCluster, task: TaskId) -> int:
    try:
        address = describe(cluster.address(task), 1.0).task_address
        snapshot = fetch_snapshot(address, "Task", 1.0).decode() if address else ""
    except Unreachable:
        return -1
    return int(snapshot.partition('"step": ')[2].partition(",")[0] or -1)


def _pids() -> list[int]:
    own = [process.pid for process in descendants(os.getpid())]
    assert len(own) > 2 * len(SHAPE.tasks())
    return own


def test_the_key_is_in_no_command_line_environment_stack_or_snapshot(tmp_path: Path) -> None:
    """C2: the secret of a job was in its command line, and Monitor.Stack printed it."""
    key = chosen_key()
    assert key is not None
    secret = key.path.read_bytes().strip()
    with running(tmp_path) as cluster:
        for pid in _pids():
            for name in ("cmdline", "environ"):
                with suppress(FileNotFoundError, ProcessLookupError):  # one that asked the kernel something, and ended
                    assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
        for task in SHAPE.tasks():
            found = describe(cluster.address(task), 5.0)
            shown = [fetch_stack(cluster.address(task), 10.0), fetch_snapshot(cluster.address(task), "Monitor", 5.0)]
            shown.append(fetch_snapshot(found.task_address, "Task", 5.0))
            for data in shown:
                assert secret not in data
                assert bytes.fromhex(secret.decode()) not in data
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or secret not in file.read_bytes()


@pytest.mark.parametrize("odd", [server(0), pytest.param(worker(1), marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_task_with_another_key_is_named_with_the_file_to_copy(odd: TaskId, tmp_path: Path) -> None:
    other = make_key(tmp_path / "another-key")
    with DrillCluster(SHAPE, tmp_path / "run") as cluster:
        for task in SHAPE.tasks():
            environment = {"LOCKSTEP_KEY_FILE": str(other)} if task == odd else {}
            cluster.start(cluster.plan(task, startup_timeout=4.0), environment=environment)
        wait_until(lambda: None not in cluster.exit_codes(), START_SECONDS, "the start is given up")
        said = "".join(log.read_text() for log in (tmp_path / "run" / "logs").iterdir())
    assert re.search(rf"{re.escape(cluster.address(odd))} \(?is a Lockstep", said)
    assert "with another key; copy " in said


@pytest.mark.slow
def test_without_servers_too_workers_with_different_keys_do_not_train_together(tmp_path: Path) -> None:
    """C2: there nobody asked for the secret."""
    keys = {worker(0): {}, worker(1): {"LOCKSTEP_KEY_FILE": str(make_key(tmp_path / "another-key"))}}
    first, last = free_range(20)
    flags = ("--variable_update=collective_all_reduce", f"--ports={first}-{last}", "--startup_timeout=8")
    with tasks_of(ClusterShape(0, 2), *flags, "--num_batches=3") as tasks:
        for task, environment in keys.items():
            tasks.start(task, environment=environment)
        ended = tasks.finish(START_SECONDS)
    for done in ended.values():
        assert done.code != 0
        assert "Done warm up" not in done.stdout
    assert any("with another key; copy " in done.stderr for done in ended.values()), ended


def test_why_with_another_key_says_so_and_with_insecure_too(tmp_path: Path) -> None:
    other = make_key(tmp_path / "another-key")
    with running(tmp_path / "run") as cluster:
        address = cluster.address(server(0))
        found = run_lockstep("why", address, f"--key_file={other}", timeout=30)
        assert "with another key" in found.stdout + found.stderr
        found = run_lockstep("why", address, "--insecure", timeout=30)
        assert "wants a key" in found.stdout + found.stderr
        assert "whoever reaches a port" in found.stderr


def test_a_job_with_insecure_forms_and_answers_anybody(tmp_path: Path) -> None:
    with no_key(), running(tmp_path) as cluster:
        assert describe(cluster.address(server(0)), 5.0).task == str(server(0))


def test_the_key_of_a_user_is_made_once_for_all_tasks_of_a_first_run(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    with DrillCluster(SHAPE, tmp_path / "run") as cluster:
        for task in SHAPE.tasks():
            cluster.start(cluster.plan(task, steps=3), environment=environment)
        wait_until(lambda: None not in cluster.exit_codes(), START_SECONDS, "the job is done")
        assert set(cluster.exit_codes()) == {0}
    assert sorted(os.listdir(tmp_path / "config" / "lockstep")) == ["key", "key.tls"]
