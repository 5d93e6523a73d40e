"""A running job listens at the addresses of its tasks and nowhere else, and with ``--ports`` at no other port."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import library
from cluster.tasks import tasks_of
from helpers.listeners import elsewhere, listeners_of, outside
from helpers.ports import free_port, free_range
from helpers.programs import Program, run_lockstep, start_lockstep
from helpers.transports import RUN_HERE
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import CHIEF, ClusterShape
from lockstep.transports.control.addresses import main_address

HOST = main_address()
"""An address that other machines can reach, where there is one: loopback would hide a listener at all interfaces."""
FOREVER = "--num_batches=1000000"
START_SECONDS = 90.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MODES = {
    **{name: (ClusterShape(1, 2), f"--server_protocol={name}", 0) for name in RUN_HERE},
    "private": (ClusterShape(1, 2), "--require_private", 0),
    "replicated": (ClusterShape(1, 2), "--variable_update=distributed_replicated", 0),
    "all-reduce": (ClusterShape(0, 2), "--variable_update=collective_all_reduce", 2),
}
"""The shape of a job, its flags, and how many sockets of gloo it has, for which no port can be named."""
QUICK = ("auto",)
pytestmark = [pytest.mark.timed, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    "mode",
    [name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in MODES],
)
def test_a_job_listens_at_its_listed_addresses_and_in_its_range(mode: str) -> None:
    shape, flag, of_gloo = MODES[mode]
    first, last = free_range(20)
    with tasks_of(shape, FOREVER, flag, f"--ports={first}-{last}", host=HOST) as tasks:
        for task in shape.tasks():
            tasks.start(task, environment=ONE_THREAD)
        tasks.programs[CHIEF].wait_for("Done warm up", START_SECONDS)
        found = listeners_of(tasks.programs.values())
        listed = tasks.addresses.values()
        assert elsewhere(found, HOST) == []
        assert len(outside(found, first, last, *listed)) == of_gloo, found
        assert set(listed) <= set(map(str, found))
        assert len(found) >= 2 * len(tasks.programs), found
        told = json.loads(run_lockstep("doctor", *tasks.flags, *tasks.lists(), "--json", timeout=40).stdout)
    listed_by_doctor = {f"{one['address']}:{one['port']}": one["purpose"] for one in told["listeners"]}
    assert listed_by_doctor.keys() == set(map(str, found))
    assert "unknown" not in listed_by_doctor.values()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_without_a_range_a_job_still_listens_at_its_listed_addresses_only(mode: str) -> None:
    shape, flag, _ = MODES[mode]
    with tasks_of(shape, FOREVER, flag, host=HOST) as tasks:
        for task in shape.tasks():
            tasks.start(task, environment=ONE_THREAD)
        tasks.programs[CHIEF].wait_for("Done warm up", START_SECONDS)
        assert elsewhere(listeners_of(tasks.programs.values()), HOST) == []


@pytest.mark.slow
def test_what_a_launcher_starts_listens_in_the_range_from_the_rendezvous_on() -> None:
    first, last = free_range(20)
    script = str(Path(library.__file__).with_name("endless_program.py"))
    program = (sys.executable, script, "--servers=1", f"--ports={first}-{last}")
    master = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", **ONE_THREAD}
    with ExitStack() as started:
        server = started.enter_context(Program(program, {**master, "RANK": "0"}))
        meeting = wait_until(lambda: listeners_of([server]), START_SECONDS, "rank 0 listens")
        assert (elsewhere(meeting, HOST), outside(meeting, first, last)) == ([], [])
        ranks = [started.enter_context(Program(program, {**master, "RANK": rank})) for rank in ("1", "2")]
        for one in ranks:
            one.wait_for("training", START_SECONDS)
        found = listeners_of([server, *ranks])
        assert len(found) == 9, found  # a monitor, a task and a port for tensors each
        assert (elsewhere(found, HOST), outside(found, first, last)) == ([], [])


@pytest.mark.slow
def test_a_local_cluster_takes_all_its_ports_from_the_range() -> None:
    first, last = free_range(20)
    flags = ("--ps=1", "--workers=2", "--device=cpu", "--model=lenet", "--batch_size=4", FOREVER)
    with start_lockstep("bench", *flags, f"--ports={first}-{last}", environment=ONE_THREAD) as program:
        program.wait_for("Done warm up", START_SECONDS)
        found = listeners_of([program])
        assert len(found) == 9, found
        assert (elsewhere(found, "127.0.0.1"), outside(found, first, last)) == ([], [])


def test_net_listens_at_one_address_and_in_its_range() -> None:
    first, last = free_range(20)
    ports = f"--ports={first}-{last}"
    with start_lockstep("net", f"--serve={HOST}:{first}", ports) as serving:
        serving.wait_for(f"Waiting at {HOST}:{first}", 30)
        with start_lockstep("net", f"{HOST}:{first}", ports, "--max_size=4096", "--rounds=1000") as asking:
            found = wait_until(
                lambda: each if len(each := listeners_of([serving, asking])) > 6 else (), 60, "they measure"
            )
        assert (elsewhere(found, HOST), outside(found, first, last)) == ([], [])


def test_a_range_that_is_used_up_gets_a_sentence() -> None:
    first, _ = free_range(3)
    flags = ("--ps=2", "--workers=2", "--device=cpu", "--model=lenet", "--batch_size=4", f"--ports={first}-{first + 2}")
    finished = run_lockstep("bench", *flags, timeout=60)
    assert finished.code == 2
    assert f"every port of --ports={first}-{first + 2} is taken at 127.0.0.1; give a larger range" in finished.stderr
