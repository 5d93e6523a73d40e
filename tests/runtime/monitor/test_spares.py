"""Spares of one task: they take its place after a loss, and never outlive their monitor."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

import helpers.small_task
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Program, alive, run_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import worker
from lockstep.runtime.monitor.spare import WAITING_NAME
from lockstep.runtime.monitor.task_process import REPORT_FD
from lockstep.runtime.processes import descendants, process_facts
from lockstep.transports.control.monitor_client import Unreachable, describe

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]
TASK = worker(1)
MONITOR = """
import sys
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.monitor.monitor import MonitorSpec, run_monitor
from lockstep.runtime.monitor.python_command import PythonCommand
from lockstep.runtime.monitor.spares import SparePlan
task, port, python, file, *command = sys.argv[1:]
program = PythonCommand(python=python, flags=(), file=command[1])
plan = SparePlan(count=1, program=program, loads="slow_loading:wait_for_file", words=(file,))
sys.exit(run_monitor(MonitorSpec(task=TaskId.parse(task), host="127.0.0.1", port=int(port), command=tuple(command),
    version="0.0.test", linger_seconds=0.2, restarts=3, spares=plan)))
"""
LIVES = ("ready=10.0.0.1:1", "phase=training", "say=here", "hang")


def monitored(port: int, loaded: Path, *actions: str, python: str = sys.executable) -> Program:
    task = (sys.executable, str(helpers.small_task.__file__), REPORT_FD, *actions)
    return Program([sys.executable, "-c", MONITOR, str(TASK), str(port), python, str(loaded), *task])


def pid_of(port: int) -> int:
    try:
        found = describe(f"127.0.0.1:{port}", 1.0)
    except Unreachable:
        return 0
    return found.pid if found.phase == "training" and not found.exited else 0


def waiting(program: Program) -> list[int]:
    return [facts.pid for facts in descendants(program.pid) if facts.name == WAITING_NAME]


def test_a_spare_takes_the_place_of_a_killed_task_and_without_one_it_is_started_as_always(tmp_path: Path) -> None:
    port, loaded = free_port(), tmp_path / "loaded"
    loaded.touch()
    with monitored(port, loaded, *LIVES) as program:
        first = wait_until(lambda: pid_of(port), 20, "a life")
        (spare,) = wait_until(lambda: waiting(program), 20, "a spare")
        loaded.unlink()  # the next one is not ready before the second loss
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: pid_of(port) not in (0, first) and pid_of(port), 20, "the next life") == spare
        facts = process_facts(spare)
        assert facts is not None
        assert facts.name != WAITING_NAME
        os.kill(spare, signal.SIGKILL)
        third = wait_until(lambda: pid_of(port) not in (0, spare) and pid_of(port), 20, "the life after it")
        loaded.touch()
        (other,) = wait_until(lambda: waiting(program), 20, "another spare")
        os.kill(third, signal.SIGKILL)
        assert wait_until(lambda: pid_of(port) not in (0, third) and pid_of(port), 20, "the last life") == other
        said = program.stderr()
        program.signal(signal.SIGTERM)
        program.wait(20)
    assert said.count("1 spare waits for a task to be lost") == 1
    assert re.findall(r"a spare takes the place of /job:worker/replica:0/task:1 \(pid (\d+)\)", said) == [
        str(spare),
        str(other),
    ]
    assert said.count("restarting /job:worker/replica:0/task:1") == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("is_ready", [True, False], ids=["waiting", "loading"])
def test_no_spare_outlives_its_monitor(signum: int, is_ready: bool, tmp_path: Path) -> None:
    port, loaded = free_port(), tmp_path / "loaded"
    if is_ready:
        loaded.touch()
    with monitored(port, loaded, *LIVES) as program:
        wait_until(lambda: pid_of(port), 20, "a life")
        wait_until(lambda: bool(waiting(program)) == is_ready and len(descendants(program.pid)) == 4, 20, "a spare")
        below = [facts.pid for facts in descendants(program.pid)]
        program.signal(signum)
        program.wait(20)
        wait_until(lambda: not any(map(alive, below)), 20, "the end of all")


def test_no_spare_outlives_its_job(tmp_path: Path) -> None:
    port, go, loaded = free_port(), tmp_path / "go", tmp_path / "loaded"
    loaded.touch()
    with monitored(port, loaded, "ready=10.0.0.1:1", "phase=training", f"wait={go}") as program:
        (spare,) = wait_until(lambda: waiting(program), 20, "a spare")
        go.touch()
        assert program.wait(20).code == 0
        assert not alive(spare)


def test_a_spare_that_is_killed_is_replaced(tmp_path: Path) -> None:
    port, loaded = free_port(), tmp_path / "loaded"
    loaded.touch()
    with monitored(port, loaded, *LIVES) as program:
        (spare,) = wait_until(lambda: waiting(program), 20, "a spare")
        first = wait_until(lambda: pid_of(port), 20, "a life")
        os.kill(spare, signal.SIGKILL)
        (other,) = wait_until(lambda: [pid for pid in waiting(program) if pid != spare], 20, "another spare")
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: pid_of(port) not in (0, first) and pid_of(port), 20, "the next life") == other


def test_where_no_spare_can_be_started_a_lost_task_is_started_as_always(tmp_path: Path) -> None:
    port = free_port()
    with monitored(port, tmp_path, *LIVES, python="/bin/false") as program:
        first = wait_until(lambda: pid_of(port), 20, "a life")
        program.wait_for("no spare could be started (exit code 1); a lost task is started as always", 20)
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: pid_of(port) not in (0, first), 20, "the next life")


# -- any program, below lockstep run --

FACTS = """
    import atexit, json, os, pathlib, signal, sys
    import torch
    main = sys.modules["__main__"]
    open_here = [one for one in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{one}")]
    told = {
        "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "file": __file__, "name": __name__,
        "spec": getattr(__spec__, "name", None), "package": __package__, "names": sorted(vars(main)),
        "flags": list(sys.flags), "executable": sys.executable, "here": os.getcwd(),
        "session": os.getsid(0) == os.getpid(),
        "signals": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "environ": {key: value for key, value in os.environ.items() if key != "LOCKSTEP_RUN"},
        "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))], "cuda": torch.cuda.is_initialized(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "stdout": [sys.stdout.line_buffering, sys.stdout.encoding],
        "open": sorted(os.readlink(f"/proc/self/fd/{one}").partition(":")[0] for one in open_here),
        "same": main.__dict__ is globals(), "loader": type(__loader__).__name__, "compiled": FACTS_CODE,
    }
    print(json.dumps(told), flush=True)
    print(torch.initial_seed())
    atexit.register(print, "leaving")
    if not pathlib.Path(sys.argv[1]).exists():
        while True:
            signal.pause()
    def fail():
        raise RuntimeError("as planned")
    fail() if sys.argv[2] == "raise" else sys.exit(sys.argv[2] if sys.argv[2] == "words" else int(sys.argv[2]))
"""


def program_in(folder: Path, package: str = "") -> Path:
    where = folder / package if package else folder
    where.mkdir(exist_ok=True)
    (where / "__init__.py").touch()
    path = where / "train.py"
    path.write_text(textwrap.dedent(FACTS).replace("FACTS_CODE", "(lambda: 0).__code__.co_filename"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "target", "end", "code"),
    [
        ((), "file", "7", 7),
        (("-u", "-W", "ignore::UserWarning"), "file", "raise", 1),
        ((), "module", "words", 1),
        pytest.param(("-P",), "file", "0", 0, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_spare_runs_a_program_as_a_fresh_interpreter_does(
    flags: tuple[str, ...], target: str, end: str, code: int, tmp_path: Path
) -> None:
    file, go = program_in(tmp_path, "pkg" if target == "module" else ""), tmp_path / "go"
    words = (str(file),) if target == "file" else ("-m", "pkg.train")
    command = (sys.executable, *flags, *words, str(go), end)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    with Program([*LOCKSTEP, "run", "--restarts=1", "--spares=1", "--", *command], environment) as program:
        program.wait_for("1 spare waits for a task to be lost", 60)
        (spare,) = waiting(program)
        wait_until(lambda: program.stdout(), 60, "the first life")
        (first,) = [
            one.pid for one in descendants(program.pid) if one.name != WAITING_NAME and is_program(one.pid, end)
        ]
        go.touch()
        os.kill(first, signal.SIGKILL)
        done = program.wait(60)
    with Program(command, environment) as fresh:
        alone = fresh.wait(60)
    one, other = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    differs = {key for key in one if one[key] != other[key]}
    assert not differs, {key: (one[key], other[key]) for key in differs}
    assert (done.code, alone.code) == (code, code)
    assert f"(pid {spare})" in done.stderr
    assert done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1] == "leaving"
    # The monitor says so when the spare already runs: before or after what the program prints.
    ours = "".join(line for line in done.stderr.splitlines(keepends=True) if "a spare takes the place" not in line)
    assert ours.endswith(alone.stderr)


def is_program(pid: int, end: str) -> bool:
    return (
        Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2] == end
        and b"reaper" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.slow
def test_a_variable_that_is_set_too_late_is_told(tmp_path: Path) -> None:
    go, file = tmp_path / "go", tmp_path / "train.py"
    file.write_text(
        "import os, pathlib, signal, sys\nos.environ['OMP_NUM_THREADS'] = '3'\nprint('here', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n    signal.pause()\n"
    )
    with Program([*LOCKSTEP, "run", "--spares=1", "--", sys.executable, str(file), str(go)]) as program:
        program.wait_for("1 spare waits", 60)
        program.wait_for("here", 60)
        (first,) = [one.pid for one in descendants(program.pid) if is_program(one.pid, str(go))]
        go.touch()
        os.kill(first, signal.SIGKILL)
        done = program.wait(60)
    assert done.code == 0
    assert done.stderr.count(f"{file} sets OMP_NUM_THREADS, which libraries read when a spare loaded them") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--spares=-1", "--", sys.executable, __file__), "--spares=-1 is out of range; give a number from 0 to 64."),
        (("--spares=1", "--restarts=0", "--", sys.executable, __file__), "--spares=1 has no use without restarts"),
        (("--spares=1", "--", "bash", "train.sh"), "--spares=1 needs a Python program of this interpreter"),
        (("--spares=1", "--", sys.executable, "-c", "pass"), "--spares=1 needs a Python program"),
        (("--spares=1", "--", sys.executable, "/nowhere/train.py"), "--spares=1 needs a Python program"),
    ],
)
def test_what_can_have_no_spare_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run_lockstep("run", *words, timeout=20)
    assert done.code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["--spares=1", "--spares=-2"])
def test_the_benchmark_refuses_spares_of_no_use(flag: str) -> None:
    done = run_lockstep("bench", "--ps=1", "--workers=1", flag, timeout=20)
    assert done.code == 2
    assert done.stderr.startswith(f"lockstep: {flag} ")
