"""Whole clusters of real processes, as people start them and as they break."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cluster.tasks import SMALL_RUN, any_case, tasks_of
from helpers.programs import processes_mentioning, run_lockstep, start_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.transports.control.monitor_client import describe

pytestmark = pytest.mark.timed

STEP_LINE = re.compile(r"^\d+\timages/sec: \d+\.\d \+/- \d+\.\d \(jitter = \d+\.\d\)\t\d+\.\d{3}$", re.MULTILINE)
ONE_AND_TWO = ClusterShape(1, 2)
TWO_AND_TWO = ClusterShape(2, 2)


def test_a_local_cluster_trains_and_ends_with_nothing_left(tmp_path: Path) -> None:
    done = run_lockstep(
        "bench", "--ps=1", "--workers=2", *SMALL_RUN, "--num_batches=20", f"--train_dir={tmp_path}", timeout=50
    )
    assert done.code == 0, done.stderr
    assert len(STEP_LINE.findall(done.stdout)) == 3
    assert re.search(r"^total images/sec: \d+\.\d\d$", done.stdout, re.MULTILINE)
    assert load_file(tmp_path / "final.safetensors")
    assert not processes_mentioning(str(tmp_path)), "others may run clusters here too"


@pytest.mark.slow
@pytest.mark.long
def test_two_runs_write_the_same_file(tmp_path: Path) -> None:
    flags = ("bench", "--ps=2", "--workers=2", *SMALL_RUN, "--num_batches=5", "--num_warmup_batches=1")
    for name in ("first", "second"):
        assert run_lockstep(*flags, f"--train_dir={tmp_path / name}", timeout=50).code == 0
    first, second = (tmp_path / name / "final.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_proxy_variables_do_not_matter() -> None:
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy"), "http://127.0.0.1:9")
    done = run_lockstep("bench", "--ps=1", "--workers=1", *SMALL_RUN, "--num_batches=3", timeout=50, environment=dead)
    assert done.code == 0, done.stderr


@pytest.mark.slow
def test_asynchronous_training_ends_on_every_task() -> None:
    done = run_lockstep(
        "bench", "--ps=2", "--workers=2", *SMALL_RUN, "--num_batches=10", "--cross_replica_sync=False", timeout=50
    )
    assert done.code == 0, done.stderr
    assert "Sync:        False" in done.stdout


def test_ctrl_c_ends_a_local_cluster_with_no_orphan(tmp_path: Path) -> None:
    with start_lockstep(
        "bench", "--ps=1", "--workers=2", *SMALL_RUN, f"--train_dir={tmp_path}", "--num_batches=1000000"
    ) as program:
        program.wait_for("images/sec:", 50)
        program.signal(signal.SIGINT)
        done = program.wait(20)
    assert done.code == 130
    assert "Traceback" not in done.stderr
    wait_until(lambda: not processes_mentioning(str(tmp_path)), 5, "every task has ended")


@pytest.mark.parametrize(
    "victim",
    [
        server(0),
        pytest.param(server(1), marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(worker(0), marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(worker(1), marks=pytest.mark.slow),
    ],
    ids=lambda t: t.short.replace(" ", ""),
)
def test_every_other_task_names_a_killed_one_within_5_seconds(victim: TaskId) -> None:
    with tasks_of(TWO_AND_TWO, "--num_batches=1000000", "--on_worker_loss=abort") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(1)].wait_for("images/sec:", 50)
        assert {describe(address, 5.0).phase for address in tasks.addresses.values()} == {"training"}
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        killed_at = time.monotonic()
        others = [program for task, program in tasks.programs.items() if task != victim]
        for program in others:
            program.wait_for(f"{any_case(victim)} was killed by SIGKILL", 5)
        assert time.monotonic() - killed_at < 5
        results = tasks.finish(20)
    for task, done in results.items():
        assert done.code == (1 if task == victim else 3), f"{task}: {done}"
        assert "was killed by SIGKILL" in done.stderr
        assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_killed_monitor_takes_its_task_along_and_is_named() -> None:
    with tasks_of(ONE_AND_TWO, "--num_batches=1000000", "--on_worker_loss=abort") as tasks:
        for task in ONE_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(0)].wait_for("images/sec:", 50)
        pid = tasks.task_pid(worker(1))
        tasks.programs[worker(1)].signal(signal.SIGKILL)
        for task in (server(0), worker(0)):
            assert any_case(worker(1)) in tasks.programs[task].wait_for("is gone", 6)
            assert tasks.programs[task].wait(20).code == 3
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5, "its task is gone too")


@pytest.mark.slow
def test_a_missing_task_is_named_with_what_was_found_and_ends_the_start() -> None:
    with tasks_of(ONE_AND_TWO, "--num_batches=3", "--startup_timeout=5") as tasks:
        for task in (server(0), worker(0)):
            tasks.start(task)
        results = tasks.finish(40)
    for done in results.values():
        assert done.code == 3
        assert f"worker 1 at {tasks.addresses[worker(1)]}" in done.stderr
        assert "nothing listens" in done.stderr


@pytest.mark.slow
def test_a_peers_name_that_does_not_resolve_is_a_missing_task() -> None:
    with tasks_of(ONE_AND_TWO, "--num_batches=3", "--startup_timeout=5") as tasks:
        tasks.addresses[worker(1)] = "no-such-host.invalid:20000"
        for task in (server(0), worker(0)):
            tasks.start(task)
        results = tasks.finish(40)
    for done in results.values():
        assert done.code == 3
        assert "no-such-host.invalid" in done.stderr
        assert "does not resolve" in done.stderr


@pytest.mark.slow
def test_a_task_with_another_setting_is_named() -> None:
    with tasks_of(ONE_AND_TWO, "--num_batches=3") as tasks:
        tasks.start(server(0))
        tasks.start(worker(0))
        tasks.start(worker(1), "--momentum=0.9", "--optimizer=momentum")
        results = tasks.finish(50)
    for done in results.values():
        assert done.code == 3
        assert "optimizer=" in done.stderr
        assert "start all tasks with the same value" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_report_1_command_lines_train() -> None:
    """As they stand, but for the addresses, the device, and a small batch and number of batches."""
    common = "--batch_size=1 --model=inception3 --variable_update=parameter_server --local_parameter_device=cpu"
    small = "--server_protocol grpc --device=cpu --num_batches=2 --num_warmup_batches=1"
    with tasks_of(ONE_AND_TWO) as tasks:
        tasks.flags = (*common.split(), *small.split())
        for task in ONE_AND_TWO.tasks():
            gpus = () if task == server(0) else ("--num_gpus=1",)
            tasks.start(task, *gpus, environment={"CUDA_VISIBLE_DEVICES": ""})
        results = tasks.finish(200)
    assert {done.code for done in results.values()} == {0}, results


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_report_3_command_lines_train() -> None:
    """Two hosts with a server and a worker each; the first one starts index 1, and the server takes --num_gpus too."""
    common = "--model inception3 --batch_size 1 --num_gpus 1 --variable_update=distributed_replicated"
    small = "--cross_replica_sync=True --device=cpu --num_batches=2 --num_warmup_batches=1"
    with tasks_of(TWO_AND_TWO) as tasks:
        tasks.flags = (*common.split(), *small.split())
        for task in (server(1), worker(1), server(0), worker(0)):
            tasks.start(task, environment={"CUDA_VISIBLE_DEVICES": ""})
        results = tasks.finish(200)
    assert {done.code for done in results.values()} == {0}, results


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_worker_that_starts_30_seconds_late_is_waited_for_and_named_all_the_while() -> None:
    with tasks_of(ONE_AND_TWO, "--num_batches=3") as tasks:
        tasks.start(server(0))
        early = tasks.start(worker(0))
        named = re.compile(rf"waiting for worker 1: {tasks.addresses[worker(1)]} has refused connections for (\d+) s")
        wait_until(lambda: [s for s in named.findall(early.stderr()) if int(s) >= 30], 60, "30 s of waiting")
        tasks.start(worker(1))
        results = tasks.finish(60)
    assert {done.code for done in results.values()} == {0}, results
    waited = [int(s) for s in named.findall(results[worker(0)].stderr)]
    assert len(waited) >= 5
    assert max(b - a for a, b in itertools.pairwise([0, *waited])) <= 8
