"""``lockstep why`` on live clusters, on the files of dead ones, and on what is neither."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from diagnose.faulty import frozen
from helpers import small_monitor, small_task
from helpers.ports import free_ports
from helpers.programs import Program, run_lockstep
from helpers.snapshots import PS0, W0
from helpers.waiting import wait_until
from lockstep.diagnose.collect import look_at
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.monitor.task_process import REPORT_FD
from lockstep.runtime.processes import become_subreaper
from lockstep.runtime.running_jobs import FOLDER


def test_an_address_where_nobody_answers_is_bad_input_with_the_reason() -> None:
    (port,) = free_ports(1)
    finished = run_lockstep("why", f"127.0.0.1:{port}", timeout=20)
    assert finished.code == 2
    assert "refuses connections; nothing listens" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("why", "/no/such/folder"), "is neither an address like HOST:PORT nor a folder"),
        (("why", "--wat"), "has no flag '--wat'"),
        (("why", "a:1", "b:2"), "takes one address or one folder"),
        (("why", "beef"), "nor the number of a job of yours on this host; 'lockstep why' alone lists those that run"),
    ],
)
def test_bad_words_give_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    finished = run_lockstep(*words, timeout=20)
    assert finished.code == 2
    assert sentence in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


def test_an_empty_folder_is_bad_input(tmp_path: Path) -> None:
    finished = run_lockstep("why", str(tmp_path), timeout=20)
    assert finished.code == 2
    assert "has no readable report or snapshot" in finished.stderr


def test_the_files_of_a_dead_cluster_are_analysed_and_damage_is_named(tmp_path: Path) -> None:
    cluster = frozen()
    (tmp_path / "ps-0.snapshot.json").write_text(json.dumps(cluster.task(PS0)))
    (tmp_path / "worker-0.snapshot.json").write_text(json.dumps(cluster.task(W0))[:200])
    finished = run_lockstep("why", str(tmp_path), "--json", timeout=20)
    assert finished.code == 3
    fields = json.loads(finished.stdout)
    assert fields["verdict"]["culprit"] == "/job:worker/replica:0/task:1"
    assert fields["problems"][0].startswith("worker-0.snapshot.json is ignored: it is not JSON")
    assert "Traceback" not in finished.stderr


def test_what_comes_from_files_says_so_with_folder_job_and_age(tmp_path: Path) -> None:
    folder = tmp_path / "lockstep-run"
    folder.mkdir()
    file = folder / "ps-0.snapshot.json"
    file.write_text(json.dumps(frozen().task(PS0) | {"job": "00000000000000aa"}))
    then = time.time() - 3 * 3600
    os.utime(file, (then, then))
    finished = run_lockstep("why", str(folder), timeout=20)
    first = finished.stdout.splitlines()[0]
    assert first == f"From the files of job 00000000000000aa in {folder}, 3 h old; nothing was asked."
    fields = json.loads(run_lockstep("why", str(folder), "--json", timeout=20).stdout)
    assert (fields["folder"], fields["job"]) == (str(folder), "00000000000000aa")
    assert 3 * 3600 <= fields["age_seconds"] < 4 * 3600


# -- the caller's jobs on this host --


@contextmanager
def running(environment: Mapping[str, str], script: str, *actions: str) -> Iterator[str]:
    """The address of the monitor of a task that hangs."""
    (port,) = free_ports(1)
    monitor = (sys.executable, str(small_monitor.__file__), str(worker(1)), str(port), "0", "5")
    with Program([*monitor, sys.executable, script, REPORT_FD, *actions, "hang"], environment) as program:
        address = f"127.0.0.1:{port}"

        def trains() -> bool:
            monitor = look_at("", address, 2.0).monitor
            return monitor is not None and monitor.phase == "training"

        wait_until(trains, 30, f"the task trains: {program.stderr()}")
        yield address


@pytest.mark.timed
@pytest.mark.timeout(120)
def test_without_an_argument_the_running_jobs_are_asked_or_listed_and_not_the_files_of_a_dead_one(
    tmp_path: Path,
) -> None:
    here = {"TMPDIR": str(tmp_path)}
    dead = tmp_path / f"lockstep-{os.geteuid()}" / "00000000000000aa"
    dead.mkdir(0o700, parents=True)
    dead.parent.chmod(0o700)
    (dead / "ps-0.snapshot.json").write_text(json.dumps(frozen().task(PS0)))
    assert f"in {dead}, " in run_lockstep("why", timeout=20, environment=here).stdout
    script = str(small_task.__file__)
    with running(here, script, "phase=training") as first:
        only = run_lockstep("why", timeout=20, environment=here)
        assert only.stderr.startswith("lockstep: asking a job without a number yet, 1 task, started ")
        assert only.stderr.endswith(f" s ago in {Path.cwd()}\n")
        assert "worker 1" in only.stdout
        assert str(dead) not in only.stdout
        with running(here, script, "ready=127.0.0.1:1", "phase=training") as second:
            both = run_lockstep("why", timeout=20, environment=here)
            assert both.code == 2
            heading, newest, oldest = both.stderr.splitlines()
            assert heading == "lockstep: 2 jobs of yours run on this host; ask one of them:"
            number = f"{small_task.JOB:016x}"
            assert newest.startswith(f"lockstep: lockstep why {second}    job {number}, 1 task, started ")
            assert oldest.startswith(f"lockstep: lockstep why {first}    a job without a number yet, 1 task, started ")
            named = run_lockstep("why", number, timeout=20, environment=here)
            assert named.stderr.startswith(f"lockstep: asking job {number}, 1 task, started ")
    # Both were killed with their monitors.
    assert f"in {dead}, " in run_lockstep("why", timeout=20, environment=here).stdout
    assert list((dead.parent / FOLDER).iterdir()) == []


@pytest.mark.timeout(120)
@pytest.mark.timed
def test_a_live_cluster_answers_healthy_and_with_half_of_it_gone_within_two_seconds(tmp_path: Path) -> None:
    """Also with one task frozen and one killed together with its monitor: what is left names them."""
    become_subreaper()
    shape = ClusterShape(2, 2)
    with DrillCluster(shape, tmp_path) as cluster:
        places = {task: cluster.start(cluster.plan(task, steps=100_000, on_stall="report")) for task in shape.tasks()}
        address = cluster.address(worker(0))

        def training() -> bool:
            view = look_at(str(worker(0)), address, 2.0).view
            return view is not None and view.step >= 10

        wait_until(training, 60, "the cluster trains")
        finished = run_lockstep("why", address, timeout=30)
        assert finished.code == 0, finished.stdout + finished.stderr
        assert "Healthy: 4 tasks answer" in finished.stdout
        assert "the slowest part is" in finished.stdout
        os.kill(cluster.task_pid(server(0)), signal.SIGSTOP)
        cluster.kill_monitor(places[worker(1)])
        wait_until(lambda: _stands(address), 30, "a report that names who is missing")
        began = time.monotonic()
        finished = run_lockstep("why", address, "--json", timeout=30)
        fields = json.loads(finished.stdout)
        assert finished.code == 3
        assert fields["verdict"]["culprit"] in (str(server(0)), str(worker(1)))
        assert fields["verdict"]["cause"] in ("frozen", "dead")
        # Two seconds are for a machine that is not busy with other tests; the bound on asking holds everywhere.
        assert time.monotonic() - began < 8.0


def _stands(address: str) -> bool:
    # On a quick machine the first answer comes before any wait is longer than usual: silence alone proves nothing.
    finished = run_lockstep("why", address, "--json", timeout=30)
    return finished.code == 3 and json.loads(finished.stdout)["verdict"] is not None
