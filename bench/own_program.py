"""A user's program under several systems, in turns: time of a step and memory, beside DDP and a plain loop.

    python bench/own_program.py nanogpt --device=cpu --workers=2 --only=ddp,ranks,server --rounds=3
    python bench/own_program.py gpt2 --device=cuda --workers=1 --only=plain,ddp,ranks,server-gpu,server --budget=540 \
        --program="--batch_size=16 --length=1024"
    python bench/own_program.py gpt2 --device=cuda --workers=2 --mps --only=ddp,ranks --program="--batch_size=8"

The programs are in ``bench/programs/``. Every system gets the same model, data, options and number of trainers; servers
are processes besides. Processes have the variables that torchrun gives them, OMP_NUM_THREADS=1 among them where there
are several (``--threads`` gives another number). Rounds are interleaved, and ratios are taken within a round. No run
begins that would not end within ``--budget`` seconds; what was measured until then is printed and is in ``--json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memory_watch import MARK, MemoryWatch
from programs.pausing import LOOKED, PAUSE, TIMED

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("nanogpt", "gpt2", "seq2seq", "alexnet", "vit", "resnet50")
RESULT = "result "
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Entrant:
    """One row of the table: how the program is started."""

    name: str
    flags: tuple[str, ...]
    servers: int = 0

    def command(self, program: str, more: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", f"programs.{program}", *self.flags, *more]


ENTRANTS = {
    entrant.name: entrant
    for entrant in (
        Entrant("plain", ("--system=plain",)),
        Entrant("ddp", ("--system=ddp",)),
        Entrant("ddp-views", ("--system=ddp", "--ddp_views")),
        Entrant("ddp-gloo", ("--system=ddp", "--ddp_backend=gloo")),
        Entrant("ranks", ("--system=lockstep",)),
        Entrant("server", ("--system=lockstep-servers",), servers=1),
        Entrant("server-gpu", ("--system=lockstep-servers", "--join=device=gpu"), servers=1),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one entrant: milliseconds of a step on its slowest trainer, or why there are none."""

    round: int
    ms: float = 0.0
    processor_ms: float = 0.0
    """Of a trainer's step, on all its threads; on a machine that others use it says more than the clock does."""
    seconds: float = 0.0
    loss: float = 0.0
    memory: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""


# -- one run --


def measure(
    entrant: Entrant, asked: argparse.Namespace, environ: Mapping[str, str], number: int, seconds: float
) -> Run:
    """Run it once, in round ``number``, for ``seconds`` at most."""
    began, mark = time.monotonic(), uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="own-program-") as folder,
        MemoryWatch(mark, asked.device == "cuda") as watch,
    ):
        after = AfterSteps(Path(folder), asked.workers, watch)
        with _started(entrant, asked, {**environ, MARK: mark, PAUSE: folder}, Path(folder)) as processes:
            failure = _wait(processes, began + seconds, after)
        outputs = [Path(folder, f"{rank}.out").read_text(errors="replace") for rank in range(len(processes))]
    took = time.monotonic() - began
    results = [found for output in outputs if (found := _result(output)) is not None]
    trained = [result for result in results if "ms_per_step" in result]
    if failure or len(trained) < asked.workers:
        last = " / ".join(line for output in outputs for line in output.strip().splitlines()[-asked.tail :])
        return Run(number, seconds=took, failure=f"{failure or 'it told no result'}: {last or 'it printed nothing'}")
    memory = {"host": watch.peak, "gpu_used": watch.gpu_peak}
    for kind in ("gpu_allocated", "gpu_reserved"):
        memory[kind] = sum(result["memory"].get(kind, 0) for result in results)
    slowest = max(result["ms_per_step"] for result in trained)
    worked = statistics.fmean(result["processor_ms_per_step"] for result in trained)
    return Run(number, slowest, worked, took, statistics.fmean(result["loss"] for result in trained), memory)


@contextlib.contextmanager
def _started(
    entrant: Entrant, asked: argparse.Namespace, environ: Mapping[str, str], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a run; after the block none of them is left."""
    world = asked.workers + entrant.servers
    more = [f"--device={asked.device}", f"--steps={asked.steps}", f"--warm_up={asked.warm_up}", *asked.program]
    shared = {**environ, **_variables(world, asked.threads)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with (folder / f"{rank}.out").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        entrant.command(asked.name, more),
                        cwd=ROOT,
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )
        yield processes
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            _end(processes, signum)


def _variables(world: int, threads: int) -> dict[str, str]:
    """What torchrun sets, and where our sources are."""
    sources = [str(ROOT / "bench"), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, sources)),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_two_free_ports()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if threads or world > 1:
        variables["OMP_NUM_THREADS"] = str(threads or 1)
    return variables


def _two_free_ports() -> int:
    """The first of two: Lockstep gathers its tasks at the port after torch's."""
    import socket

    while True:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            second.bind(("127.0.0.1", port + 1))
            return port


@dataclass(slots=True)
class AfterSteps:
    """The trainers wait when their steps are made, all of them still holding what they need for the next."""

    folder: Path
    trainers: int
    watch: MemoryWatch

    def look(self) -> None:
        """Look at their memory if all are there, and let them go on."""
        seen = self.folder / LOOKED
        if not seen.exists() and len([*self.folder.glob(f"{TIMED}*")]) == self.trainers:
            self.watch.look()
            seen.touch()


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float, after: AfterSteps) -> str:
    """Until all have succeeded; otherwise what is wrong."""
    while True:
        after.look()
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            return f"process {failed[0][0]} ended with exit code {failed[0][1]}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            return "it did not end in time"
        time.sleep(_POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]], signum: signal.Signals) -> None:
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        if process.poll() is None:
            process.send_signal(signum)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _result(output: str) -> dict[str, Any] | None:
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines else None


# -- all runs --


def compare(asked: argparse.Namespace, entrants: Sequence[Entrant], runs: Mapping[str, list[Run]]) -> None:
    """Round after round, each beginning with another entrant, as long as the budget lasts; fills ``runs``."""
    deadline = time.monotonic() + asked.budget
    with _gpu_shared(asked) as environ:
        for number in range(1, asked.rounds + 1):
            first = (number - 1) % len(entrants)
            for entrant in (*entrants[first:], *entrants[:first]):
                left = deadline - time.monotonic()
                longest = max((run.seconds for run in runs[entrant.name]), default=0.0)
                if left < longest * 1.2 + 2 * _END_SECONDS:
                    print(f"round {number}: no time for {entrant.name}", flush=True)
                    continue
                limit = min(asked.run_timeout, left - 2 * _END_SECONDS)
                run = measure(entrant, asked, environ, number, limit)
                runs[entrant.name].append(run)
                print(f"round {number}: {entrant.name}: {_words(run)}", flush=True)
                _write(asked, runs)


@contextlib.contextmanager
def _gpu_shared(asked: argparse.Namespace) -> Iterator[dict[str, str]]:
    environ = dict(os.environ)
    if not asked.mps:
        yield environ
        return
    sys.path.insert(0, str(ROOT / "src"))
    from lockstep.runtime.local_cluster.gpu_sharing import shared_gpu

    with shared_gpu(environ, print):
        yield environ


def _words(run: Run) -> str:
    if run.failure:
        return f"failed after {run.seconds:.0f} s: {run.failure}"
    host, gpu = run.memory["host"] / _MIB, run.memory["gpu_allocated"] / _MIB
    on_gpu = f", {gpu:,.0f} MiB of the GPU" if gpu else ""
    took = f"took {run.seconds:.0f} s"
    times = f"{run.ms:.2f} ms a step ({run.processor_ms:.0f} of processors)"
    return f"{times}, loss {run.loss:.4f}, {host:,.0f} MiB{on_gpu}, {took}"


def _write(asked: argparse.Namespace, runs: Mapping[str, Sequence[Run]]) -> None:
    if not asked.json:
        return
    rows = {name: [{**asdict(run), "memory": dict(run.memory)} for run in known] for name, known in runs.items()}
    path = Path(asked.json)
    path.with_suffix(".part").write_text(json.dumps({"asked": vars(asked), "runs": rows}, indent=1))
    path.with_suffix(".part").replace(path)


# -- the table --


def table(runs: Mapping[str, Sequence[Run]], base: str, gpu: bool) -> list[str]:
    """Markdown. A ratio above 1 is faster than ``base``; memory is that of all processes, at its peak."""
    titles = ["", "ms a step, median (lowest to highest)", f"speed / {base}", "processor ms", "rounds", "host MiB"]
    titles += ["GPU MiB allocated", "reserved", "in use"] if gpu else []
    titles.append(f"memory / {base}")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    kinds = ("host", "gpu_allocated", "gpu_reserved", "gpu_used") if gpu else ("host",)
    for name, known in runs.items():
        good = [run for run in known if not run.failure]
        if not good:
            lines.append(f"| {name} | {'failed' if known else 'not run'} |" + " |" * (len(titles) - 2))
            continue
        shown = [f"{_memory(good, kind) / _MIB:,.0f}" for kind in kinds]
        most = "gpu_allocated" if gpu else "host"
        theirs = _memory([run for run in runs.get(base, ()) if not run.failure], most)
        more = f"{_memory(good, most) / theirs:.2f}" if theirs else "-"
        cells = [name, _spread([run.ms for run in good], 2), _spread(ratios(known, runs.get(base, ())), 3)]
        cells += [f"{statistics.median([run.processor_ms for run in good]):.2f}", str(len(good))]
        lines.append("| " + " | ".join([*cells, *shown, more]) + " |")
    return lines


def ratios(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    """How many times as fast as ``base``, round by round."""
    theirs = {run.round: run.ms for run in base if run.ms}
    return [theirs[run.round] / run.ms for run in runs if run.ms and run.round in theirs]


def _memory(runs: Sequence[Run], kind: str) -> float:
    return statistics.median([run.memory[kind] for run in runs]) if runs else 0.0


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Entrant]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes that train")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS of each; 0: as torchrun sets it")
    parser.add_argument("--only", default="ddp,ranks,server", help=f"of: {', '.join(ENTRANTS)}")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=ENTRANT FLAGS",
        help="another row: '16bits=server --join=wire_dtype=bfloat16'",
    )
    parser.add_argument("--base", default="ddp", help="what the ratios are of")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm_up", type=int, default=8)
    parser.add_argument("--program", type=shlex.split, default=[], help="flags of the program, in one text")
    parser.add_argument("--mps", action="store_true", help="processes share the GPU through NVIDIA's MPS, all rows")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all runs")
    parser.add_argument("--run_timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--tail", type=int, default=3, help="lines of each process to show when a run fails")
    parser.add_argument("--json", default="")
    asked = parser.parse_args(argv)
    known = dict(ENTRANTS)
    for each in asked.also:
        name, _, rest = each.partition("=")
        like, *flags = shlex.split(rest) or [""]
        if like not in known:
            parser.error(f"--also={each}: {like!r} is not a row; use one of: {', '.join(known)}")
        known[name] = Entrant(name, (*known[like].flags, *flags), known[like].servers)
    chosen = [*asked.only.split(","), *(each.partition("=")[0] for each in asked.also)]
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--only={','.join(unknown)} is not known; use: {', '.join(known)}")
    return asked, [known[name] for name in chosen]


def main() -> None:
    asked, entrants = parse(sys.argv[1:])
    runs: dict[str, list[Run]] = {entrant.name: [] for entrant in entrants}
    with contextlib.suppress(KeyboardInterrupt):
        compare(asked, entrants, runs)
    cores = len(os.sched_getaffinity(0))
    size = " ".join(asked.program) or "its defaults"
    print(f"\n{asked.name} ({size}), {asked.device}, {asked.workers} trainer(s), {asked.steps} steps, {cores} cores\n")
    for line in table(runs, asked.base, asked.device == "cuda"):
        print(line)
    if any(run.failure for known in runs.values() for run in known) or not all(runs.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
