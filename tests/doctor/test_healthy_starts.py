"""A healthy cluster yields no finding, neither from ``doctor`` nor while it starts, in any order."""

from __future__ import annotations

import json
import random
import re
import threading

import pytest

from doctor.plain_cluster import plain_cluster
from helpers.ports import free_port
from helpers.waiting import wait_until
from lockstep.protocol.ids import server, worker
from lockstep.transports.wire.tcp_probe import probe

pytestmark = pytest.mark.timed

STARTS = 50
FINDING = re.compile(
    r"differ|do not match|another program|another job|firewall|(does not|cannot) reach|verdict|stall|failed|job ended",
    re.IGNORECASE,
)


def test_doctors_on_all_tasks_find_nothing_in_five_seconds() -> None:
    with plain_cluster(2, 2) as cluster:
        # They do not start at the same instant on a busy machine; the last one finds all others waiting for it.
        doctors = {task: cluster.doctor(task, "--json", "--wait=15") for task in cluster.shape.tasks()}
        try:
            done = {task: program.wait(20) for task, program in doctors.items()}
        finally:
            for program in doctors.values():
                program.close()
    assert min(json.loads(finished.stdout)["seconds"] for finished in done.values()) < 5
    for task, finished in done.items():
        assert finished.code == 0, f"{task}: {finished}"
        said = json.loads(finished.stdout)
        assert said["healthy"] is True
        assert said["findings"] == []
        assert {pair["to"] for pair in said["pairs"] if pair["reached"]} == {str(one) for one in cluster.addresses}


def test_doctor_queries_a_running_job() -> None:
    with plain_cluster(1, 1) as cluster:
        for task in cluster.shape.tasks():
            cluster.start(task, hold=True)
        for program in cluster.programs.values():
            program.wait_for("formed", 30)
        with cluster.doctor(None) as doctor:
            done = doctor.wait(20)
        assert done.code == 0, done
        assert "ps 0 is already running here (training for" in done.stdout
        with cluster.doctor(worker(0), "--batch_size=7") as doctor:
            other = doctor.wait(20)
    assert other.code == 1
    assert "but with different flags: it has batch_size=32, this command line has batch_size=7" in other.stdout


def test_doctor_names_the_job_that_was_left_behind() -> None:
    with plain_cluster(1, 2) as cluster:
        for task in (server(0), worker(0), worker(1)):
            cluster.start(task, hold=True)
        for program in cluster.programs.values():
            program.wait_for("formed", 30)
        cluster.addresses[worker(1)] = "127.0.0.1:1024"
        with cluster.doctor(worker(0)) as doctor:
            done = doctor.wait(20)
    assert done.code == 1
    assert "worker 0 is already running here as process" in done.stdout
    assert "its host lists differ" in done.stdout


@pytest.mark.slow
def test_doctor_sees_a_second_task_with_its_index_that_starts_later() -> None:
    with plain_cluster(1, 2) as cluster:
        elsewhere = free_port()
        flags = ("--wait=6", f"--bind=127.0.0.1:{elsewhere}")
        with cluster.doctor(worker(0), *flags) as first:
            wait_until(lambda: probe(f"127.0.0.1:{elsewhere}").is_open, 10, "the first doctor listens")
            with cluster.doctor(worker(0), "--wait=6"):
                done = first.wait(20)
    assert f"worker 0 is already running at {cluster.addresses[worker(0)]} as process" in done.stdout
    assert done.code == 1


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_no_finding_in_fifty_healthy_starts() -> None:
    dice = random.Random(6)
    pause = threading.Event()
    for number in range(STARTS):
        with plain_cluster(1, 2) as cluster:
            tasks = list(cluster.shape.tasks())
            dice.shuffle(tasks)
            for task in tasks:
                cluster.start(task)
                pause.wait(dice.choice((0.0, 0.0, 0.1, 0.5, 1.5)))
            for task, program in cluster.programs.items():
                done = program.wait(40)
                assert done.code == 0, f"start {number}, {task}: {done}"
                assert "formed" in done.stdout
                assert not FINDING.search(done.stderr), f"start {number}, {task}: {done.stderr}"
