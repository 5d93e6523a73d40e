"""Drills in jobs that are not ours: DDP or FSDP2 over gloo, started by torchrun, under ``lockstep watch``.

The program (``watch/drill_program.py``) is an ordinary one in which rank 1 of three misbehaves. What is judged is what
the watcher wrote to ``events.jsonl``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lockstep
from lockstep.drill.result import DrillResult
from lockstep.foreign import read_json
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.runtime.processes import descendants, send_signal

SYSTEMS: Final = ("ddp", "fsdp")
PROGRAM: Final = Path(lockstep.__file__).parent / "watch" / "drill_program.py"
RANKS: Final = 3
PATIENCE_SECONDS: Final = 240.0
"""For the start of four Pythons with torch on a busy machine, and the report."""
LEAVE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.05
_RANK_1: Final = "rank 1"


@dataclass(frozen=True, slots=True)
class SystemDrill:
    """A fault of rank 1, and what is to be said about it first. ``place``: the function of the program to be named."""

    name: str
    story: str
    cause: Cause
    kind: ReportKind = ReportKind.VERDICT
    culprit: str = _RANK_1
    place: str = ""


_NOTICE: Final = ReportKind.NOTICE
SYSTEM_DRILLS: Final = (
    SystemDrill("kill", "a rank is killed by SIGKILL", Cause.DEAD),
    SystemDrill("stop", "a rank is stopped by SIGSTOP", Cause.FROZEN),
    SystemDrill("sleep", "the program of a rank sleeps", Cause.USER_CODE, _NOTICE, place="misbehave"),
    SystemDrill("lock", "the program of a rank takes a lock twice", Cause.USER_CODE, _NOTICE, place="misbehave"),
    SystemDrill("loop", "the program of a rank loops without end", Cause.LOOPING, _NOTICE, place="misbehave"),
    SystemDrill("gil", "native code keeps the interpreter's lock", Cause.USER_CODE, _NOTICE, place="misbehave"),
    SystemDrill("loader", "the process that loads data is stopped", Cause.INPUT_STARVED),
    SystemDrill("skip", "a rank leaves out one collective", Cause.OTHER_CALL),
    SystemDrill("other_shape", "a rank sums a tensor of another size", Cause.OTHER_CALL),
    SystemDrill("other_dtype", "a rank sums a tensor of another dtype", Cause.OTHER_CALL),
    SystemDrill("opposite", "two groups in opposite order", Cause.DEADLOCK, culprit="ranks 0 and 1"),
    SystemDrill("exit", "a rank ends early, without an error", Cause.OUT_OF_STEP),
    SystemDrill("raise", "the program of a rank raises an error", Cause.FAILED, place="misbehave"),
    SystemDrill("slow", "a rank becomes slow", Cause.STRAGGLER, _NOTICE),
    SystemDrill("always_slow", "a rank is slow from its first step", Cause.STRAGGLER, _NOTICE),
)


def torchrun(*arguments: str, ranks: int = RANKS, program: Path = PROGRAM) -> list[str]:
    """A job on this host, at a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(program), *arguments]


def run_system_drill(drill: SystemDrill, system: str, keep: str = "") -> DrillResult:
    """Run the job, wait for the first word about the fault, and end it."""

    def command(mark: Path) -> list[str]:
        # Where Lockstep is installed, its files are a library's, and no line of one is named as the program's.
        program = Path(shutil.copy(PROGRAM, mark.with_name("program.py")))
        flags = (f"--kind={system}", f"--fault={drill.name}", f"--mark={mark}", "--steps=200")
        return torchrun(*flags, program=program)

    return run_planted(drill, f"{system} {drill.name}", command, keep)


def run_planted(drill: SystemDrill, name: str, command: Callable[[Path], list[str]], keep: str = "") -> DrillResult:
    """The same with any job: ``command`` gets the file in which it is to say when the fault has struck."""
    result = DrillResult(name=name, struck=drill.cause.value)
    with _folder(keep, name.replace(" ", "-")) as folder:
        mark = folder / "mark"
        with watched(command(mark), folder):
            found = _first_word(folder, mark)
        result.report = (folder / "output.txt").read_text(errors="replace")
    if found is None:
        result.conclude(["nothing was said in time"])
        return result
    seconds = found["time"] - found["struck"]
    result.notice_seconds = seconds
    result.verdict_seconds = seconds if found["kind"] == ReportKind.VERDICT else None
    result.said, result.kind, result.cause = found["cause"], found["kind"], found["cause"]
    result.culprit, result.peer, result.key, result.step = (found[n] for n in ("culprit", "peer", "key", "step"))
    result.conclude(list(_problems(drill, found)))
    return result


def _problems(drill: SystemDrill, found: dict[str, Any]) -> Iterator[str]:
    if found["cause"] != drill.cause:
        yield f"the cause is {found['cause']}, and should be {drill.cause}"
    if found["culprit"] != drill.culprit:
        yield f"the culprit is {found['culprit']}, and should be {drill.culprit}"
    if found["kind"] != drill.kind:
        yield f"it is a {found['kind']}, and should be a {drill.kind}"
    if drill.place not in found["text"]:
        yield f"{drill.place} is not named"


@contextlib.contextmanager
def watched(command: list[str], folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job under ``lockstep watch``, of which nothing is left afterwards."""
    watch = [sys.executable, "-m", "lockstep", "watch", f"--folder={folder / 'run'}", *flags, "--", *command]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(watch, stdout=output, stderr=subprocess.STDOUT, env=variables)
    try:
        yield process
    finally:
        below = descendants(process.pid)
        send_signal(process.pid, signal.SIGTERM)
        for facts in below:
            send_signal(facts.pid, signal.SIGKILL)
        process.wait(LEAVE_SECONDS)


def events_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [read_json(line) for line in lines]


def _first_word(folder: Path, mark: Path) -> dict[str, Any] | None:
    """The first event after the fault has struck; with it, when that was."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if mark.exists():
            struck = float(mark.read_text())
            for event in events_in(folder):
                if event["time"] >= struck:
                    return {**event, "struck": struck}
        time.sleep(_LOOK_SECONDS)
    return None


@contextlib.contextmanager
def _folder(keep: str, name: str) -> Iterator[Path]:
    if not keep:
        with tempfile.TemporaryDirectory(prefix="lockstep-drill-") as temporary:
            yield Path(temporary)
        return
    folder = Path(keep, name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700, parents=True)
    yield folder
