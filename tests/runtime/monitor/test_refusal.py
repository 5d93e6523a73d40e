"""A task that fails before it joins: why reaches those who ask its address, also after nobody is there any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.ports import free_ports
from helpers.programs import LOCKSTEP, Program
from helpers.waiting import wait_until
from lockstep.errors import EXIT_BAD_INPUT, BadInput
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.address_finding import AddressFinding, EndMemory, look
from lockstep.runtime.task.failures import told_to_monitor

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
