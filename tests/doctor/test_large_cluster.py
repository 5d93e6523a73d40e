"""Forty tasks on one machine: the cluster forms in time, and missing ones are named."""

from __future__ import annotations

import compileall
import re
import time

import pytest

from doctor.plain_cluster import SOURCES, plain_cluster
from helpers.waiting import wait_until
from lockstep.protocol.ids import server, worker
from lockstep.protocol.phrases import named

pytestmark = pytest.mark.timed

SERVERS, WORKERS = 4, 36


@pytest.fixture(scope="module", autouse=True)
def _compiled_sources() -> None:
    """An installed Lockstep has its bytecode next to it; where Python may not write any, each of the 120 processes
    would compile all of it again, which is not what is measured here."""
    assert compileall.compile_dir(SOURCES, quiet=2)


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_forty_tasks_form_in_twenty_seconds() -> None:
    with plain_cluster(SERVERS, WORKERS) as cluster:
        began = time.monotonic()
        for task in cluster.shape.tasks():
            cluster.start(task, hold=True)
        wait_until(
            lambda: all("formed" in program.stdout() for program in cluster.programs.values()),
            90,
            "all tasks are members",
        )
        took = time.monotonic() - began
    assert took < 20, f"it took {took:.1f} s"


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_three_missing_tasks_of_forty_are_named() -> None:
    missing = {server(2), worker(7), worker(30)}
    with plain_cluster(SERVERS, WORKERS) as cluster:
        for task in cluster.shape.tasks():
            if task not in missing:
                cluster.start(task, hold=True)
        coordinator = cluster.programs[server(0)]
        everybody_else_is_there = re.compile(r"37 of 40 tasks are up")
        chief = cluster.programs[worker(0)]
        wait_until(lambda: everybody_else_is_there.search(chief.stderr()), 60, "the line of the chief")
        for task in missing:
            text = f"is waiting for {named(task)}: {cluster.addresses[task]} has refused connections for"
            wait_until(lambda text=text: text in coordinator.stderr(), 30, text)  # type: ignore[misc]
        late = coordinator.stderr().rpartition("37 of")[2].splitlines()[-3:]
        assert all(any(named(task) in line for task in missing) for line in late if "is waiting for" in line)
        assert "missing: ps 2, worker 7, worker 30" in chief.stderr()
        with cluster.doctor(worker(7)) as doctor:
            found = doctor.wait(30)
    assert "ps 2 is missing" in found.stdout
    assert "worker 30 is missing" in found.stdout
    assert found.stdout.count("is missing") == 2
    assert found.code == 1
