"""The user's own program, run once in one shape: its processes, as torchrun would start them, and their times."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.benchmark.compare.program_results import ProgramRun
from lockstep.benchmark.compare.programs import Program, Programs, RunFailedError
from lockstep.errors import EXIT_BAD_INPUT
from lockstep.runtime.compared import COMPARE_VARIABLE, ComparedRun, Shape, StepParts, read_parts, two_ports

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramComparison:
    """What is compared: a program with its arguments, in these shapes."""

    program: Path
    arguments: tuple[str, ...]
    shapes: tuple[Shape, ...]
    servers: int
    workers: int
    threads: int
    """Per trainer; a single process gets those of all."""
    warm_up: int
    steps: int
    repeats: int
    run_timeout: float


@dataclass(frozen=True, slots=True)
class ProgramRunner:
    """Runs the program. ``environ`` is the environment of its processes."""

    comparison: ProgramComparison
    environ: Mapping[str, str]

    def measure(self, shape: Shape) -> ProgramRun:
        """Run it once. Failures are part of the result."""
        deadline = time.monotonic() + self.comparison.run_timeout
        with tempfile.TemporaryDirectory(prefix="lockstep-compare-") as place:
            try:
                with Programs(Path(place), self.environ) as programs, two_ports() as port:
                    return self._run(shape, programs, port, deadline)
            except RunFailedError as error:
                return ProgramRun(failure=str(error))

    def _run(self, shape: Shape, programs: Programs, port: int, deadline: float) -> ProgramRun:
        comparison = self.comparison
        run = ComparedRun(
            shape=shape,
            servers=comparison.servers if shape is Shape.SERVERS else 0,
            warm_up=comparison.warm_up,
            steps=comparison.steps,
            folder=programs.folder,
        )
        trainers = 1 if shape is Shape.SINGLE else comparison.workers
        started = self._start(run, trainers + run.servers, port, programs)
        if (sentence := _wait(started, deadline)) is not None:
            return ProgramRun(cannot=sentence)
        return ProgramRun(parts=_mean([_read(run, worker) for worker in range(trainers)]))

    def _start(self, run: ComparedRun, world: int, port: int, programs: Programs) -> list[Program]:
        comparison = self.comparison
        all_threads = comparison.threads * comparison.workers
        threads = all_threads if run.shape is Shape.SINGLE else comparison.threads
        command = [sys.executable, str(comparison.program), *comparison.arguments]
        variables = {
            COMPARE_VARIABLE: run.variable(),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",  # it must not leave the machine
        }
        return [
            programs.start(
                f"{run.shape.value}-{rank}", command, talks=False, **variables, RANK=str(rank), LOCAL_RANK=str(rank)
            )
            for rank in range(world)
        ]


def _wait(started: Sequence[Program], deadline: float) -> str | None:
    """Until all have succeeded. The sentence of one that refuses to run like this; RunFailedError otherwise."""
    while True:
        codes = [program.process.poll() for program in started]
        for program, code in zip(started, codes, strict=True):
            if code == EXIT_BAD_INPUT:
                return program.last_words()
            if code:
                raise program.failure()
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            late = next(program for program, code in zip(started, codes, strict=True) if code is None)
            late.wait(deadline)  # says what to do about it
        time.sleep(_POLL_SECONDS)


def _read(run: ComparedRun, worker: int) -> StepParts:
    try:
        return read_parts(run.times_of(worker))
    except (OSError, ValueError):
        raise RunFailedError(
            f"the program ended before its timed steps: trainer {worker} made fewer than {run.warm_up + 1} with the "
            "optimizer that it gave to job.wrap(); let it run longer, or give a smaller --num_warmup_batches"
        ) from None


def _mean(parts: Sequence[StepParts]) -> StepParts:
    """Trainers take their steps together, but each has its own share of computing and waiting."""
    count = len(parts)
    return StepParts(
        steps=min(each.steps for each in parts),
        step=max(each.step for each in parts),
        forward=sum(each.forward for each in parts) / count,
        backward=sum(each.backward for each in parts) / count,
        averaging=sum(each.averaging for each in parts) / count,
        optimizer=sum(each.optimizer for each in parts) / count,
    )
