"""Two jobs that take turns on one machine: while one runs, all processes of the other are stopped (SIGSTOP).

Whole runs one after another meet another machine each: a minute can be a fifth slower than the next. Here both jobs
are under way, and change places every second or so. What counts is what a job has made of the time in which it ran, and
how much of the processors it took. Starting them is not part of it.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

_STEP_LINE = re.compile(r"^(\d+)\timages/sec")
_START_SECONDS = 180.0
_END_SECONDS = 20.0
_RESAMPLES = 2_000


@dataclass(slots=True)
class Turn:
    """What one job made of its time."""

    seconds: float
    steps: float
    processor: float


@dataclass(slots=True)
class TurnJob:
    """One of the two: its processes, the times in which they ran, and when it said how many steps it had made."""

    process: subprocess.Popen[str]
    said: list[tuple[float, int]] = field(default_factory=list)
    ran: list[tuple[float, float]] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    """Processor seconds of each turn, of all processes."""
    began: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (found := _STEP_LINE.match(line)) is not None:
                self.said.append((time.monotonic(), int(found[1])))
                self.began.set()
        self.began.set()

    def family(self) -> list[psutil.Process]:
        whole = psutil.Process(self.process.pid)
        return [whole, *whole.children(recursive=True)]

    def send(self, what: signal.Signals) -> None:
        for one in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(what)

    def run_for(self, seconds: float) -> None:
        before, began = self._processor_seconds(), time.monotonic()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        self.ran.append((began, time.monotonic()))
        self.used.append(self._processor_seconds() - before)
        if self.process.poll() is not None:
            sys.exit(f"a run ended with exit code {self.process.returncode}: {self.process.args!r}")

    def _processor_seconds(self) -> float:
        total = 0.0
        for one in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                used = one.cpu_times()
                total += used.user + used.system
        return total

    def turns(self) -> list[Turn]:
        """Steps between two lines count as made evenly over the time in which this job ran."""
        marks = [(self._clock_at(at), step) for at, step in self.said]
        ends = [self._clock_at(ended) for _, ended in self.ran]
        steps = [_steps_at(marks, end) for end in [0.0, *ends]]
        return [
            Turn(ended - began, after - before, used)
            for (began, ended), before, after, used in zip(self.ran, steps, steps[1:], self.used, strict=False)
        ]

    def _clock_at(self, moment: float) -> float:
        return sum(max(0.0, min(ended, moment) - began) for began, ended in self.ran)


def _steps_at(marks: Sequence[tuple[float, int]], clock: float) -> float:
    """On the line through the two marks around this moment, or through the last two."""
    after = min(max(1, bisect_left(marks, (clock, 0))), len(marks) - 1)
    (early, few), (late, many) = marks[after - 1], marks[after]
    return few + (many - few) * (clock - early) / max(late - early, 1e-9)


@contextlib.contextmanager
def running(*flags: str) -> Iterator[TurnJob]:
    """``lockstep bench FLAGS``, stopped after its first timed step."""
    command = [sys.executable, "-m", "lockstep", "bench", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    job = TurnJob(process)
    listener = threading.Thread(target=job.listen, daemon=True)
    listener.start()
    try:
        if not job.began.wait(_START_SECONDS) or process.poll() is not None:
            sys.exit(f"no step within {_START_SECONDS:.0f} s: {' '.join(command)}")
        job.send(signal.SIGSTOP)
        yield job
    finally:
        _end(job)
        listener.join(_END_SECONDS)


def _end(job: TurnJob) -> None:
    if job.process.poll() is not None:
        return
    family = job.family()
    job.send(signal.SIGCONT)
    job.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(_END_SECONDS)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    job.process.wait()


Pair = tuple[Turn, Turn]


def take_turns(first: TurnJob, second: TurnJob, turns: int, seconds: float) -> list[Pair]:
    """The order changes from turn to turn. Turns are to be short: one job with turns of two seconds has ended with exit
    code 3, and nobody knows why."""
    for turn in range(turns):
        for job in (first, second) if turn % 2 == 0 else (second, first):
            job.run_for(seconds)
    pairs = list(zip(first.turns(), second.turns(), strict=True))
    if any(turn.steps <= 0 for pair in pairs for turn in pair):
        raise SystemExit(f"a job made no step in a turn of {seconds:g} s: take longer turns")
    return pairs


def more(pairs: Sequence[Pair], what: str) -> float:
    """How much more of ``what`` a step of the second takes than one of the first."""

    def per_step(turns: Sequence[Turn]) -> float:
        return sum(float(getattr(one, what)) for one in turns) / sum(one.steps for one in turns)

    firsts, seconds = zip(*pairs, strict=True)
    return per_step(seconds) / per_step(firsts) - 1


def interval(pairs: Sequence[Pair], what: str) -> tuple[float, float]:
    """Where that lies with 95 % for these two jobs, from resampling the turns."""
    chance = random.Random(1)
    found = sorted(more(chance.choices(pairs, k=len(pairs)), what) for _ in range(_RESAMPLES))
    return found[_RESAMPLES // 40], found[-_RESAMPLES // 40]
