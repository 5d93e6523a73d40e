"""What a monitor says and decides: signals, out-of-memory evidence, exit codes. No processes here."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lockstep.protocol.core.timing import SAME_SIGNAL_SECONDS
from lockstep.runtime.monitor.exit import Action, Stopping, describe_death, exit_code_after
from lockstep.runtime.monitor.oom import Counter, OomWitness, find_counters
from lockstep.runtime.processes import signal_name


def write_count(path: Path, kills: int) -> Counter:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom 4\noom_kill {kills}\noom_group_kill 0\n")
    return Counter(path, "here")


def test_a_count_that_rose_within_the_last_two_samples_is_evidence(tmp_path: Path) -> None:
    counter = write_count(tmp_path / "memory.events", 3)
    witness = OomWitness([counter], now=0.0)
    witness.sample(1.0)
    write_count(counter.path, 4)
    witness.sample(2.0)  # the kernel counts before the process is gone, so a sample may come in between
    assert witness.evidence() == f"{counter.path} counts one out-of-memory kill here just now"


def test_an_older_kill_is_no_evidence(tmp_path: Path) -> None:
    counter = write_count(tmp_path / "memory.events", 3)
    witness = OomWitness([counter], now=0.0)
    write_count(counter.path, 5)
    for second in (1.0, 2.0, 3.0):
        witness.sample(second)
    assert witness.evidence() is None


def test_counters_are_found_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/job/a\n1:cpu:/\n0::/slice/b\n")
    write_count(tmp_path / "sys/fs/cgroup/memory/job/a/memory.oom_control", 0)
    write_count(tmp_path / "sys/fs/cgroup/memory.events", 0)
    write_count(tmp_path / "proc/vmstat", 0)
    assert [str(counter.path.relative_to(tmp_path)) for counter in find_counters(tmp_path)] == [
        "sys/fs/cgroup/memory/job/a/memory.oom_control",
        "sys/fs/cgroup/memory.events",  # the path is the host's; inside the container the mount is the group
        "proc/vmstat",
    ]


def test_a_machine_without_counters_has_none(tmp_path: Path) -> None:
    assert find_counters(tmp_path) == []


@pytest.mark.parametrize(
    ("signum", "phrase"),
    [
        (signal.SIGSEGV, "was killed by SIGSEGV; a crash in native code"),
        (signal.SIGBUS, "was killed by SIGBUS; often because a shared memory file system is full"),
        (signal.SIGKILL, "was killed by SIGKILL; by a person, another program, or the kernel for lack of memory"),
        (signal.SIGUSR2, "was killed by SIGUSR2; sent by another process"),
        (40, "was killed by signal 40; sent by another process"),
    ],
)
def test_a_death_is_told_with_a_hint(signum: int, phrase: str) -> None:
    text = describe_death("/job:worker/replica:0/task:1", 123, signum, OomWitness([], 0.0))
    assert text.startswith(f"/job:worker/replica:0/task:1 (pid 123) {phrase}")


def test_a_death_by_sigkill_is_told_with_the_kernels_evidence(tmp_path: Path) -> None:
    counter = write_count(tmp_path / "memory.events", 0)
    witness = OomWitness([counter], now=0.0)
    assert "not for lack of memory" in describe_death("x", 1, signal.SIGKILL, witness)
    write_count(counter.path, 2)
    assert "probably for lack of memory: " in describe_death("x", 1, signal.SIGKILL, witness)
    assert "2 out-of-memory kills" in describe_death("x", 1, signal.SIGKILL, witness)


@pytest.mark.parametrize(
    ("task_code", "stopped_by", "code"),
    [
        (0, None, 0),
        (3, None, 3),
        (-9, None, 1),
        (-15, signal.SIGINT, 130),
        (0, signal.SIGTERM, 143),
        (0, signal.SIGHUP, 129),
    ],
)
def test_exit_codes(task_code: int, stopped_by: int | None, code: int) -> None:
    assert exit_code_after(task_code, stopped_by) == code


def test_the_first_signal_asks_and_the_second_kills() -> None:
    stopping = Stopping(patience=5.0)
    assert stopping.on_signal(signal.SIGINT, 10.0) is Action.ASK
    assert stopping.on_signal(signal.SIGINT, 10.0 + SAME_SIGNAL_SECONDS / 2) is None
    assert stopping.on_signal(signal.SIGTERM, 11.0) is Action.KILL
    assert stopping.on_signal(signal.SIGINT, 12.0) is None
    assert stopping.signum == signal.SIGINT
    assert stopping.next_deadline() is None


def test_too_long_a_wait_kills_once() -> None:
    stopping = Stopping(patience=5.0)
    assert stopping.on_time(100.0) is None
    stopping.on_signal(signal.SIGTERM, 10.0)
    assert stopping.next_deadline() == 15.0
    assert stopping.on_time(14.9) is None
    assert stopping.on_time(15.0) is Action.KILL
    assert stopping.on_time(15.1) is None


def test_signals_have_their_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"
