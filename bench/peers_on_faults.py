"""The same faults, other tools: what each says about a DDP job that hangs, after how many seconds, right or wrong.

    python bench/peers_on_faults.py [--faults=kill,stop,...] [--seconds=30] [--json]

Each fault strikes rank 1 of three (``watch/drill_program.py``, DDP over gloo) and every tool has ``--seconds`` for it:

- ``bare``: torchrun and DDP alone. What they say is torchrun's summary, if the job ends.
- ``recorder``: the same, and the program dumps torch's flight recorder every two seconds by itself, since over gloo
  nothing does before a time-out of 30 minutes. After ``--seconds``, torch's own analyser (``torchfrtrace``) reads them.
- ``debug``: the same, and the program starts torch's debug server, whose page of the flight recorder is read after
  ``--seconds``; where aiohttp and tabulate are installed, which it needs.
- ``why``: ``lockstep why`` on these same dumps.
- ``watch``: ``lockstep watch``, with the program as it is.

Right means: it names rank 1 (or, of a ring of waits, a rank in it), and not as one of all. Ray Train's detector asks
NCCL how many calls each rank has made, which needs a GPU a rank: over gloo it has nobody to ask, and is not run.
NVRx's parts for hangs wait for heartbeats that the program has to send, for 45 minutes and more, and are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.drill.result import DrillStatus
from lockstep.drill.systems import SYSTEM_DRILLS, SystemDrill, run_system_drill, torchrun
from lockstep.runtime.processes import descendants, send_signal

START_SECONDS = 240.0
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s+: (\d+).*?exitcode\s+: (-?\d+)", re.DOTALL)
PAGE_SECONDS = 20.0
HAS_DEBUG_SERVER = all(importlib.util.find_spec(name) is not None for name in ("aiohttp", "tabulate"))
ANALYSER = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]


@dataclass(frozen=True, slots=True)
class Said:
    """``seconds``: after the fault; None: nothing was said in time."""

    fault: str
    tool: str
    what: str
    seconds: float | None
    right: bool

    def line(self) -> str:
        after = "-" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"{self.fault:<12} {self.tool:<9} {after:>7}  {'right' if self.right else 'no':<6} {self.what}"


@contextlib.contextmanager
def running(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(output, "wb") as written:
        job = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield job
    finally:
        for facts in descendants(job.pid):
            send_signal(facts.pid, signal.SIGKILL)
        if job.poll() is None:
            job.kill()
        job.wait()


def wait_for_fault(mark: Path, job: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + START_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline or job.poll() is not None:
            raise SystemExit("the job did not start")
        time.sleep(0.02)
    return float(mark.read_text())


def without_lockstep(drill: SystemDrill, seconds: float) -> Iterator[Said]:
    """One run, with dumps, for three tools."""
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        mark, output, dumps = folder / "mark", folder / "output.txt", folder / "dumps"
        dumps.mkdir()
        port = free_port() if HAS_DEBUG_SERVER else 0
        arguments = [f"--fault={drill.name}", f"--mark={mark}", f"--dumps={dumps}", f"--debug_port={port}"]
        page: Said | None = None
        with running(torchrun(*arguments, "--steps=1000"), output) as job:
            struck = wait_for_fault(mark, job)
            while time.time() < struck + seconds and job.poll() is None:
                time.sleep(0.02)
            ended = None if job.poll() is None else time.time() - struck
            if port:
                page = by_debug_server(drill.name, port, struck)
        yield by_torchrun(drill.name, output.read_text(errors="replace"), ended)
        if page is not None:
            yield page
        yield by_analyser(drill.name, dumps, time.time() - struck)
        yield by_why(drill, dumps, time.time() - struck)


def by_torchrun(fault: str, text: str, ended: float | None) -> Said:
    found = ROOT_CAUSE.search(text)
    if found is None:
        what = "nothing" if ended is None else "the job ends, and no rank is named"
        return Said(fault, "bare", what, None, False)
    return Said(fault, "bare", f"rank {found[1]} failed first, exit code {found[2]}", ended, found[1] == "1")


def by_analyser(fault: str, dumps: Path, after: float) -> Said:
    done = subprocess.run(
        [*ANALYSER, "--allow-incomplete-ranks", "-p", "rank_", str(dumps)],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    what = lines[-1].strip() if lines else "nothing"
    return Said(fault, "recorder", what[:100], after, done.returncode == 0 and "rank 1" in done.stdout)


def by_debug_server(fault: str, port: int, struck: float) -> Said:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/fr_trace", timeout=PAGE_SECONDS) as answer:
            text = answer.read().decode(errors="replace")
    except OSError as error:
        return Said(fault, "debug", f"no page: {error}", None, False)
    found = re.search(r"(\w+Error: .*)", text)
    what = found[1] if found else "tables of groups and calls, without a conclusion"
    return Said(fault, "debug", what[:100], time.time() - struck, False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def by_why(drill: SystemDrill, dumps: Path, after: float) -> Said:
    command = [sys.executable, "-m", "lockstep", "why", "--json", str(dumps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_SECONDS)
    try:
        verdict = json.loads(done.stdout)["verdict"]
    except (ValueError, KeyError):
        return Said(drill.name, "why", done.stderr.strip()[:100], after, False)
    if verdict is None:
        return Said(drill.name, "why", "nothing is stuck", after, False)
    return Said(
        drill.name, "why", f"{verdict['cause']}: {verdict['culprit']}", after, verdict["culprit"] == drill.culprit
    )


def by_watch(drill: SystemDrill) -> Said:
    result = run_system_drill(drill, "ddp")
    what = f"{result.cause}: {result.culprit}" if result.cause else "nothing"
    return Said(drill.name, "watch", what, result.notice_seconds, result.status is DrillStatus.PASSED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", default=",".join(drill.name for drill in SYSTEM_DRILLS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    wanted = args.faults.split(",")
    for drill in [drill for drill in SYSTEM_DRILLS if drill.name in wanted]:
        for said in (*without_lockstep(drill, args.seconds), by_watch(drill)):
            print(json.dumps(asdict(said)) if args.json else said.line(), flush=True)


if __name__ == "__main__":
    main()
