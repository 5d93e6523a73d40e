"""How long a cluster takes to form, from the launch of its tasks to the first step, in two versions of this program.

    git worktree add ../before COMMIT
    python bench/forming.py ../before . [--servers=8] [--workers=32] [--rounds=6] [--torch]

Each round forms one cluster on this machine from either tree, and one from the second with ``--insecure``, one after
the other; the order changes from round to round, and what counts is the ratio within a round. Three numbers each:

- seconds from the launch until every worker has the initial parameters,
- of these, the seconds after the last task had imported everything and listened (its phase ``connecting``),
- processor seconds of all processes until then, which mean something on a busy machine too.

The tasks are those of a drill, without torch: importing it takes most of the time that a cluster needs on a few cores,
and would hide what else changed. ``--torch`` runs ``lockstep bench --model=trivial`` instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from two_trees import interval

LIMIT_SECONDS = 300.0
_FORMED = ("warming up", "training")
_ASK = """
import json, sys
from lockstep.transports.control.monitor_client import fetch_snapshot
for address in sys.argv[1:]:
    print(json.dumps(json.loads(fetch_snapshot(address, "Monitor", 30.0))))
"""


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    tree: Path
    insecure: bool = False

    def environment(self) -> dict[str, str]:
        more = {"LOCKSTEP_INSECURE": "said"} if self.insecure else {}
        return {**os.environ, "PYTHONPATH": str(self.tree / "src"), "OMP_NUM_THREADS": "1", **more}


@dataclass(frozen=True, slots=True)
class Formed:
    """What one cluster took, in seconds."""

    all_of_it: float
    connecting: float
    processor: float


def form(contestant: Contestant, servers: int, workers: int, torch: bool) -> Formed:
    """Start every task, wait for the first step, ask each monitor when its task was where, and end all."""
    with free_hosts(servers + workers) as hosts, tempfile.TemporaryDirectory(prefix="lockstep-forming-") as folder:
        tasks = [("ps", index) for index in range(servers)] + [("worker", index) for index in range(workers)]
        commands = [
            (bench_command if torch else drill_command)(role, index, hosts[:servers], hosts[servers:], folder)
            for role, index in tasks
        ]
        chief = Path(folder, f"{servers}.log")
        began = time.time()
        with running(commands, contestant, Path(folder)) as processes:
            until = time.monotonic() + LIMIT_SECONDS
            while not has_begun(chief, torch):
                ended = [number for number, process in enumerate(processes) if process.poll() is not None]
                if time.monotonic() > until or ended:
                    log = Path(folder, f"{ended[0]}.log") if ended else chief
                    raise SystemExit(f"{contestant.name} did not form:\n{log.read_text()[-3000:]}")
                time.sleep(0.02)
            processor = sum(processor_seconds(process.pid) for process in processes)
            phases = [entered for _, entered in ask(contestant, hosts)]
    formed = max(min(entered[phase] for phase in _FORMED if phase in entered) for entered in phases[servers:])
    return Formed(formed - began, formed - max(entered["connecting"] for entered in phases), processor)


def has_begun(log: Path, torch: bool) -> bool:
    """Whether the chief has said that it did its first step, for which all tasks are needed."""
    return log.exists() and ("\timages/sec" if torch else "step 0") in log.read_text()


def drill_command(role: str, index: int, servers: list[str], workers: list[str], folder: str) -> list[str]:
    task = f"/job:{role}/replica:0/task:{index}"
    plan = {"task": task, "ps_hosts": servers, "worker_hosts": workers, "faults": [], "folder": folder, "steps": 10**6}
    plan |= {"step_seconds": 0.5, "startup_timeout": LIMIT_SECONDS}
    return ["drill", "--lockstep_monitor=", json.dumps(plan)]


def bench_command(role: str, index: int, servers: list[str], workers: list[str], _folder: str) -> list[str]:
    return [
        *("bench", f"--job_name={role}", f"--task_index={index}"),
        *(f"--ps_hosts={','.join(servers)}", f"--worker_hosts={','.join(workers)}", "--device=cpu"),
        *("--model=trivial", "--batch_size=1", "--num_threads=1", "--num_warmup_batches=0", "--display_every=1"),
        *("--num_batches=1000000", f"--startup_timeout={LIMIT_SECONDS:g}"),
    ]


@contextlib.contextmanager
def running(commands: list[list[str]], contestant: Contestant, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All tasks; none of their processes is left afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "lockstep", *command],
                        env=contestant.environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield processes
    finally:
        below = [child for process in processes for child in descendants(process.pid)]
        for pid in (*(process.pid for process in processes), *(child.pid for child in below)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.wait()
        psutil.wait_procs(below, timeout=30.0)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def processor_seconds(pid: int) -> float:
    """Of a process and all below it, those that have ended included."""
    total = 0.0
    for process in (psutil.Process(pid), *descendants(pid)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def ask(contestant: Contestant, hosts: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """When each task first entered each phase. Only a program of the same tree and key is answered."""
    command = [sys.executable, "-c", _ASK, *hosts]
    answers = subprocess.run(command, env=contestant.environment(), stdout=subprocess.PIPE, text=True, check=True)
    for host, line in zip(hosts, answers.stdout.splitlines(), strict=True):
        snapshot = json.loads(line)
        entered: dict[str, float] = {}
        for phase in snapshot["phases"]:
            entered.setdefault(phase["phase"], snapshot["time"] - phase["began_seconds_ago"])
        yield host, entered


@contextlib.contextmanager
def free_hosts(count: int) -> Iterator[list[str]]:
    """Addresses that the kernel gives to nobody else: bound, and not listening."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def main() -> None:
    """Print each round, then the mean ratios to the first tree with their intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--torch", action="store_true", help="tasks of lockstep bench, which import torch")
    asked = parser.parse_args()
    before, after = asked.before.resolve(), asked.after.resolve()
    contestants = [Contestant("before", before), Contestant("after", after), Contestant("insecure", after, True)]
    found: dict[str, list[Formed]] = {one.name: [] for one in contestants}
    for number in range(asked.rounds):
        first = number % len(contestants)
        for one in (contestants[first:] + contestants[:first])[:: 1 if number % 2 else -1]:
            it = form(one, asked.servers, asked.workers, asked.torch)
            found[one.name].append(it)
            words = f"{it.all_of_it:.2f} s, connecting {it.connecting:.2f} s, CPU {it.processor:.1f} s"
            print(f"round {number + 1}: {one.name} {words}", flush=True)
    for name in ("after", "insecure"):
        print(f"{name}/before: {', '.join(summary(found['before'], found[name]))}")


def summary(before: list[Formed], after: list[Formed]) -> Iterator[str]:
    for field, words in (("all_of_it", "launch to first step"), ("connecting", "connecting"), ("processor", "CPU")):
        ratios = [getattr(a, field) / getattr(b, field) for b, a in zip(before, after, strict=True)]
        low, high = interval(ratios)
        yield f"{words} {statistics.fmean(ratios):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
