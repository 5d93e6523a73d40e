"""The tools that keep processes together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.programs import Program, alive
from helpers.waiting import wait_until
from lockstep.runtime import processes


def test_signals_come_as_bytes_in_order_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with processes.SignalInbox((signal.SIGTERM, signal.SIGUSR1)) as inbox:
        assert inbox.take() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.fileno() in processes.wait_readable({inbox.fileno()}, 5)
        assert inbox.take() == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_program_that_is_done_ignores_further_signals() -> None:
    code = (
        "import os, signal; from lockstep.runtime.processes import SignalInbox\n"
        "with SignalInbox((signal.SIGINT,), until_exit=True): pass\n"
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0


def test_facts_of_a_process_with_an_awkward_name(tmp_path: Path) -> None:
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    with Program([str(odd), "100"]) as program:
        wait_until(lambda: (f := processes.process_facts(program.pid)) and f.name == odd.name, 5, "it runs")
        facts = processes.process_facts(program.pid)
        assert facts is not None
        assert (facts.pid, facts.parent, facts.threads) == (program.pid, os.getpid(), 1)
        program.signal(signal.SIGSTOP)
        wait_until(lambda: (f := processes.process_facts(program.pid)) and f.state == "stopped", 5, "it is stopped")


def test_a_process_that_does_not_exist_has_no_facts() -> None:
    assert processes.process_facts(2**22 + 1) is None


def test_what_cuda_left_of_one_process_is_removed(tmp_path: Path) -> None:
    for name in ("cuda.shm.0.4d1.1", "cuda.shm.0.4d1.2", "cuda.shm.0.4d2.1", "psm_4d1"):
        (tmp_path / name).touch()
    processes.remove_cuda_memory(0x4D1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cuda.shm.0.4d2.1", "psm_4d1"]


def test_a_guarded_program_dies_with_its_parent() -> None:
    code = (
        "import subprocess, sys; from lockstep.runtime.processes import dies_with_this_process as guarded\n"
        "child = subprocess.Popen(guarded(['sleep', '100'])); print(child.pid, flush=True); child.wait()"
    )
    with Program([sys.executable, "-c", code]) as parent:
        child = int(parent.wait_for("\n", 10))
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", 10, "the shim has become the program")
        parent.signal(signal.SIGKILL)
        wait_until(lambda: not alive(child), 5, "the child is dead")


def test_a_guarded_program_that_cannot_be_started_is_told_in_one_line() -> None:
    with Program(processes.dies_with_this_process(["/no/such/program"])) as program:
        finished = program.wait(10)
    assert (finished.code, finished.stderr) == (
        127,
        "lockstep: cannot start /no/such/program: No such file or directory\n",
    )


def test_a_guarded_program_starts_with_pythons_signal_changes_undone() -> None:
    """Python ignores SIGPIPE; a program that inherits that would not end when its reader does."""
    with Program(processes.dies_with_this_process(["cat", "/proc/self/status"])) as program:
        status = program.wait(10).stdout
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    assert int(ignored, 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_the_monitor_is_free_of_torch_and_the_keeper_of_everything_installed() -> None:
    modules = "lockstep.runtime.monitor.monitor, lockstep.runtime.local_cluster.cluster"
    monitor = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", monitor], timeout=30) == b"False\n"
    reaper = processes.python_without_site(
        "from lockstep.runtime.monitor import reaper; "
        "print([m for m in sys.modules.values() if 'site-packages' in (getattr(m, '__file__', '') or '') "
        "and not m.__name__.startswith('lockstep')])"
    )
    assert subprocess.check_output(reaper, timeout=30) == b"[]\n"
