"""A task that fails before it joins: why reaches those who ask its address, also after nobody is there any more."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

from helpers.ports import free_ports
from helpers.programs import LOCKSTEP, Program
from helpers.waiting import wait_until
from lockstep.diagnose.text import lead_line
from lockstep.drill.task import PlainStore
from lockstep.errors import EXIT_BAD_INPUT, BadInput
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport, TaskReporter
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.startup.address_finding import AddressFinding, EndMemory, look
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.startup_progress import Board
from lockstep.runtime.task.failures import told_to_monitor
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.server_node import ServerNode
from lockstep.transports.control.addresses import parse_address
from lockstep.version import __version__

DESCRIPTION = Description(
    task=str(worker(1)),
    host="here",
    monitor_pid=1,
    pid=2,
    incarnation=0,
    phase="ended",
    phase_seconds=1.0,
    task_address="",
    exited=True,
    exit_code=2,
    version="1",
    job=0,
)
NOBODY = AddressFinding("refused", answer=Reach.REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [(("--modle=lenet",), "--modle"), (("--data_dir=/no/such/folder",), "/no/such/folder")],
    ids=["bad flag", "missing folder"],
)
def test_a_refused_command_line_is_answered_for_at_the_address_of_its_task(flags: tuple[str, ...], reason: str) -> None:
    ps, first, second = free_ports(3)
    lists = (f"--ps_hosts=127.0.0.1:{ps}", f"--worker_hosts=127.0.0.1:{first},127.0.0.1:{second}")
    with Program((*LOCKSTEP, "bench", *lists, "--job_name=worker", "--task_index=1", *flags)) as refused:

        def answer() -> str:
            finding = look(worker(1), f"127.0.0.1:{second}")
            return finding.text if finding.description is not None and finding.description.exited else ""

        said = wait_until(answer, 20, "an answer")
        assert f"exit code {EXIT_BAD_INPUT}" in said
        assert reason in said
        done = refused.wait(20)
    assert done.code == EXIT_BAD_INPUT
    assert reason in done.stderr


def test_a_refused_command_line_without_an_address_is_only_refused() -> None:
    with Program((*LOCKSTEP, "bench", "--job_name=worker", "--modle=lenet")) as refused:
        assert refused.wait(20).code == EXIT_BAD_INPUT


def test_how_a_task_ended_is_known_after_its_monitor_has_left() -> None:
    memory = EndMemory()
    assert memory.with_end(NOBODY, 0.0).note == ""
    memory.with_end(AddressFinding("ended with exit code 2: no such flag", DESCRIPTION, True), 10.0)
    assert memory.with_end(NOBODY, 15.0).phrase(3.0).endswith("; 6 s ago it ended with exit code 2: no such flag")


def test_a_task_that_was_started_again_has_not_ended() -> None:
    memory = EndMemory()
    memory.with_end(AddressFinding("ended with exit code 2", DESCRIPTION, True), 10.0)
    memory.with_end(AddressFinding("is up", replace(DESCRIPTION, exited=False), True), 11.0)
    assert memory.with_end(NOBODY, 15.0).note == ""


def test_the_coordinator_says_why_a_task_was_refused_after_its_monitor_has_left() -> None:
    ps, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    cluster = ClusterSpec(ps_hosts=(ps,), worker_hosts=(other,), startup_timeout=60.0, task=server(0))
    record = TaskRecord(str(worker(0)), __version__, os.getpid())
    record.on_started(os.getpid())
    record.on_report(TaskReport(reason="there is no flag --modle"))
    record.on_exited(EXIT_BAD_INPUT)
    place = parse_address(other)
    refused = MonitorService(place.host, place.port, record)
    node = ServerNode(NodeConfig(cluster=cluster, settings=()), PlainStore, lambda _: None, TaskReporter.none())
    node.start()
    try:
        wait_until(lambda: node.peers[worker(0)].last_end.how, 20, "it is seen by the coordinator")
        refused.close()

        def lead() -> str:
            return lead_line(node.watchdog.look_now())

        said = wait_until(lambda: found if "has not joined" in (found := lead()) else "", 20, "nobody is there")
        assert re.search(r"orker 0 has not joined: it ended with exit code 2 .*: there is no flag --modle\. ", said)
    finally:
        refused.close()
        node.close()


def test_the_line_about_a_start_says_why_a_task_is_missing_after_its_monitor_has_left() -> None:
    board = Board((server(0), worker(1)))
    up = replace(DESCRIPTION, task=str(server(0)), exited=False, phase="connecting")
    board.note(server(0), AddressFinding("is up", up, True), 1.0)
    board.note(worker(1), AddressFinding("ended with exit code 2: no such flag", DESCRIPTION, True), 2.0)
    board.note(worker(1), NOBODY, 5.0)
    assert board.line(8.0).endswith("nothing listens there; 4 s ago it ended with exit code 2: no such flag")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("libtorch.so: cannot map segment"), "failed: ImportError: libtorch.so: cannot map segment"),
        (MemoryError("no room"), "failed: MemoryError: no room"),
        (BadInput("--x is not known."), "--x is not known."),
    ],
)
def test_an_error_that_ends_a_task_goes_to_its_monitor_first(error: Exception, reason: str) -> None:
    reporter = TaskReporter.none()
    with pytest.raises(type(error)), told_to_monitor(reporter):
        raise error
    assert reporter.report.reason == reason
