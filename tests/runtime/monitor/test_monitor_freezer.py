"""A task whose control group is frozen counts as stopped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from lockstep.runtime.monitor.freezer import FROZEN, is_frozen, task_facts

FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def frozen_group(pid: int) -> Iterator[None]:
    group = FREEZER / f"lockstep-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        (FREEZER / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def test_a_process_of_a_frozen_group_is_stopped_until_it_thaws() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with frozen_group(process.pid):
            wait_until(lambda: is_frozen(process.pid), 5.0, "the group is frozen")
            facts = task_facts(process.pid)
            assert facts is not None
            assert (facts.stopped, facts.state) == (True, FROZEN)
        thawed = task_facts(process.pid)
        assert thawed is not None
        assert not thawed.stopped
        process.kill()


@pytest.mark.parametrize(("events", "frozen"), [("populated 1\nfrozen 1\n", True), ("populated 1\nfrozen 0\n", False)])
def test_the_second_version_of_control_groups_tells_it_in_its_events(events: str, frozen: bool, tmp_path: Path) -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.partition("::")[2] for line in lines if line.startswith("0::")), None)
    if path is None:
        pytest.skip("this kernel has no control groups of the second version")
    group = tmp_path / path.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.events").write_text(events)
    assert is_frozen(os.getpid(), tmp_path) is frozen


def test_a_process_that_is_gone_is_not_frozen() -> None:
    assert task_facts(2**22) is None
    assert not is_frozen(2**22)
