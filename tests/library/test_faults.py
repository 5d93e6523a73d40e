"""Faults in programs of one's own, in both shapes of a job, and where gloo carries the gradients: the others name them
within 5 s, with file and line where there is one, and 15 s after the end of the job nothing is left of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.ports import free_ports
from helpers.programs import processes_mentioning
from helpers.waiting import wait_until
from helpers.warm_programs import WarmProgram, WarmStart, warm_start

PROGRAM = Path(__file__).with_name("faulty_program.py")
NAMED_SECONDS = 5.0
GONE_SECONDS = 15.0
ENDS_AFTER = 6.0
"""``user_code_timeout`` and ``stall_after`` of the program: what may only be slow ends the job then."""
HANGING = ("lock", "loop", "native", "descriptors", "stop")
FAULTS = ("kill", "lock", "exit", "raise", "loop", "native", "descriptors", "memory", "stop", "skip", "finish")
OVER_GLOO = ("kill", "lock", "raise", "stop", "skip", "finish")
pytestmark = [pytest.mark.drill, pytest.mark.timed, pytest.mark.timeout(180)]


def line_of(fault: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# here: {fault}"))


def names(fault: str) -> list[str]:
    """What the others must be told in one line."""
    what = {
        "kill": "was killed by SIGKILL",
        "lock": "stuck in user code",
        "exit": "called sys.exit(5)",
        "raise": "failed with KeyError: 'labels'",
        "loop": "does not leave",
        "native": "native code blocks all its Python threads",
        "descriptors": "has closed all its descriptors",
        "memory": "can't allocate memory",
        "stop": "has been stopped for",
        "skip": "every worker must make the same calls in the same order",
        "finish": "stopped after 5 steps",
    }[fault]
    if fault in ("kill", "descriptors", "stop", "skip", "finish"):
        return [what]
    return [what, f"{PROGRAM.name}, line {line_of(fault)}" if fault == "exit" else f"{PROGRAM.name}:{line_of(fault)}"]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    with warm_start() as started:
        yield started


@dataclass
class FaultyJob:
    """One job whose worker 1 has a fault."""

    fault: str
    address: str
    programs: list[WarmProgram]
    struck: float = 0.0

    def strike(self) -> None:
        self.programs[-1].wait_for("struck", 90)
        self.struck = time.monotonic()

    def is_named(self) -> bool:
        lines = [line for line in self.programs[-2].said().splitlines() if "orker 1" in line]
        return any(all(part in line for part in names(self.fault)) for line in lines)

    def assert_named(self) -> None:
        left = self.struck + NAMED_SECONDS - time.monotonic()
        wait_until(self.is_named, left, f"{names(self.fault)} in: {self.programs[-2].said()}")

    def assert_gone(self) -> None:
        ends = self.struck + (ENDS_AFTER if self.fault in HANGING else 0.0)
        for program in self.programs:
            program.wait(ends + GONE_SECONDS - time.monotonic())
        left = max(1.0, ends + GONE_SECONDS - time.monotonic())
        wait_until(lambda: not processes_mentioning(self.address), left, "the sidecars are gone")


def start(warm: WarmStart, fault: str, servers: int, backend: str, started: ExitStack) -> FaultyJob:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(servers + 2)]
    flags = [str(PROGRAM), f"--worker_hosts={','.join(addresses[servers:])}", f"--fault={fault}"]
    flags += [f"--ps_hosts={','.join(addresses[:servers])}", "--on_worker_loss=abort"] if servers else []
    flags += [f"--backend={backend}"] if backend else []
    tasks = [("ps", 0)] * servers + [("worker", 0), ("worker", 1)]
    commands = [[*flags, f"--job_name={name}", f"--task_index={index}"] for name, index in tasks]
    return FaultyJob(fault, addresses[0], [started.enter_context(warm.start(command)) for command in commands])


@pytest.mark.parametrize(
    ("backend", "fault"), [*(("", fault) for fault in FAULTS), *(("gloo", fault) for fault in OVER_GLOO)]
)
def test_a_fault_in_a_program_is_named_in_time_and_nothing_stays(warm: WarmStart, backend: str, fault: str) -> None:
    shapes = (0,) if backend else (0, 1)
    with ExitStack() as started:
        jobs = [start(warm, fault, servers, backend, started) for servers in shapes]  # all at once, to save time
        for job in jobs:
            job.strike()
        for job in jobs:
            job.assert_named()
        for job in jobs:
            job.assert_gone()
            chief, faulty = (program.code() for program in job.programs[-2:])
            assert chief
            assert faulty == {"exit": 5, "kill": -9}.get(fault, faulty)
