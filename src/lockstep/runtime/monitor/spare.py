"""What a spare runs: it loads what every task needs, waits, and then becomes a task.

A spare is a Python process of its own, started like a task (through a reaper, in its own session), that waits at a
socket. The monitor of a lost task sends it that task's command, a Python program, which it runs as ``__main__`` as a
fresh interpreter would: the same arguments, ``sys.path``, streams, signals, exit code. While it waits it uses no
processor time, and has no threads but those that libraries start when they are loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from lockstep.foreign import read_json
from lockstep.runtime import processes
from lockstep.runtime.monitor.python_command import PythonCommand, python_command

READY: Final = b"r"
"""The spare's only message: everything is loaded."""
GO: Final = b"g"
"""The answer; with it come stdout, stderr and a file that describes the task."""

WAITING_NAME: Final = "lockstep-spare"
"""What ``ps`` and the kernel call it while it waits."""

_COMM: Final = Path("/proc/self/comm")
_NICE: Final = 10
_CAP_SYS_NICE: Final = 23
_READ_AT_IMPORT: Final = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_CPU_"),
    *("TORCH_LOGS", "TORCHDYNAMO_", "TORCH_COMPILE_"),
)
"""What libraries read when they are loaded, which has happened before a spare knows its program."""


def main() -> None:
    """``sys.argv``: where this package is (it stands last in ``sys.path``), the socket, what to load, for what."""
    root, descriptor, plan = sys.argv[1:4]
    asked: dict[str, Any] = read_json(plan)
    sys.path[:] = _search_path(_python_program(asked["program"]), sys.path[:-1])
    sys.path.append(root)
    lowered = _lower_priority()
    _load(asked["loads"], asked["words"])
    del sys.path[len(sys.path) - 1 - sys.path[::-1].index(root)]
    with socket.socket(fileno=int(descriptor)) as control:
        os.set_inheritable(control.fileno(), False)
        told = _wait(control)
    if told is None:
        return  # whoever kept this spare is gone
    if lowered:
        _raise_priority()
    _become(told)


def _python_program(words: list[str]) -> PythonCommand:
    found = python_command(words)
    assert found is not None, "only Python programs have spares"
    return found


def _search_path(program: PythonCommand, given: list[str]) -> list[str]:
    """``sys.path`` as this program would have it; ``given``: as a program in a string has it."""
    return given if sys.flags.safe_path else [_folder_of(program), *given[1:]]


def _folder_of(program: PythonCommand) -> str:
    return os.getcwd() if program.module else os.path.dirname(os.path.realpath(program.file))


def _load(what: str, words: list[str]) -> None:
    """Whatever goes wrong here, the task itself will meet it again, and say so. Variables stay as they were: libraries
    set some that a program would then find set."""
    module, _, function = what.partition(":")
    before = dict(os.environ)
    with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
        getattr(importlib.import_module(module), function)(words)
    _take_environment(before)


def _wait(control: socket.socket) -> dict[str, Any] | None:
    """Until it is to take a place. No deadline: its reaper ends it with whoever keeps it."""
    name = _COMM.read_text()
    _COMM.write_text(WAITING_NAME)
    control.send(READY)
    said, descriptors, _, _ = socket.recv_fds(control, 16, 3)
    _COMM.write_text(name)
    if said != GO or len(descriptors) != 3:
        return None
    for taken, number in zip(descriptors, (1, 2), strict=False):
        os.dup2(taken, number)
        os.close(taken)
    with open(descriptors[2], "rb") as file:
        told: dict[str, Any] = read_json(file.read())
    return told


# -- priority: loading must not slow down the job --


def _lower_priority() -> bool:
    """Only if it can be raised again: Linux lets nobody else take back what they gave up. Whether it was lowered."""
    if not _may_raise():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return False
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
    return True


def _may_raise() -> bool:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - nice:
        return True
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        able = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
        return bool(able >> _CAP_SYS_NICE & 1)
    return False


def _raise_priority() -> None:
    """Of every thread: those that libraries have started have inherited it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            number = int(thread)
            os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number) - _NICE)


# -- from a spare to a program --


def _become(told: Mapping[str, Any]) -> None:
    program = _python_program(told["words"])
    processes.let_read_stacks(told["monitor"])
    if told["environ"] is not None:
        _take_environment(told["environ"])
    os.chdir(told["cwd"])
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    if not sys.flags.safe_path:
        sys.path[0] = _folder_of(program)
    sys.orig_argv[:] = program.words
    if told["watches"]:
        _watch_environment(told["watches"])
    try:
        _run(program)
    except BaseException:
        _hide_frames()
        raise


def _take_environment(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _run(program: PythonCommand) -> None:
    main = sys.modules["__main__"]
    names = vars(main)
    for name in [name for name in names if not (name.startswith("__") and name.endswith("__"))]:
        del names[name]
    if program.module:
        import runpy

        sys.argv[:] = ["-m", *program.arguments]
        runpy._run_module_as_main(program.module)  # type: ignore[attr-defined]  # what the interpreter calls for -m
        return
    sys.argv[:] = [program.file, *program.arguments]
    _run_file(main, os.path.join(os.getcwd(), program.file))


def _run_file(main: ModuleType, path: str) -> None:
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    vars(main)["__cached__"] = None
    exec(code, vars(main))


def _hide_frames() -> None:
    """A traceback begins with the program's own lines, whatever hook the program prints it with."""
    shown = sys.excepthook

    def without_ours(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = _own(trace)
        shown(kind, error.with_traceback(own), own)

    sys.excepthook = without_ours


def _own(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<string>"):
        trace = trace.tb_next
    return trace


def _watch_environment(name_of_program: str) -> None:
    """Tell whoever sets a variable that torch has read already: it would act in another way than in a fresh process."""
    put: Callable[[Any, Any], None] = os.putenv

    def noticed(name: Any, value: Any) -> None:
        text = os.fsdecode(name)
        if text.startswith(_READ_AT_IMPORT) and os.environ.get(text) != os.fsdecode(value):
            sys.stderr.write(
                f"lockstep: {name_of_program} sets {text}, which libraries read when a spare loaded them; set it "
                "outside the program, or leave out --spares\n"
            )
        put(name, value)

    os.putenv = noticed
