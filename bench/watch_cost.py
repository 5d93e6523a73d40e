"""What ``lockstep watch`` costs a training step: the same DDP job with it and without, in turns.

    python bench/watch_cost.py [--system=ddp] [--steps=2000] [--turns=5] [--pause=0.004]

Three ranks over gloo; ``--pause`` makes a step of about 5 ms, as a GPU would. Both numbers are of rank 0's steps,
without start and warm-up: how long a step takes, and how much of a processor's time the rank uses for it, with all of
its threads. Each turn has both jobs, one after the other, and every second turn the other way round; their ratio is
what counts, and the spread over the turns says how much of it is noise. On a busy machine only the second is of use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from lockstep.drill.systems import SYSTEMS, torchrun

WARM_UP = 100


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds a step: by the clock, and of a processor."""

    took: float
    used: float


def seconds_a_step(command: list[str]) -> StepTimes:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    line = next(line for line in done.stdout.splitlines() if line.endswith("s a step"))
    took, used, *_ = line.split()
    return StepTimes(float(took), float(used))


def spread(name: str, bare: list[float], watched: list[float]) -> str:
    ratios = [one / other - 1 for one, other in zip(watched, bare, strict=True)]
    middle = statistics.median
    medians = f"{middle(bare) * 1e3:.3f} ms bare, {middle(watched) * 1e3:.3f} ms watched"
    ratio = f"{middle(ratios):+.1%} (median), {min(ratios):+.1%} to {max(ratios):+.1%}"
    return f"{name}: {medians}; ratio in {len(ratios)} turns {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, default="ddp")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.004)
    args = parser.parse_args()
    job = torchrun(
        f"--kind={args.system}", f"--steps={args.steps}", f"--at={WARM_UP}", f"--pause={args.pause}", "--times"
    )
    watch = [sys.executable, "-m", "lockstep", "watch", "--", *job]
    times: dict[str, list[StepTimes]] = {"bare": [], "watched": []}
    for turn in range(args.turns):
        order = [("bare", job), ("watched", watch)]
        for name, command in order if turn % 2 == 0 else reversed(order):
            one = seconds_a_step(command)
            times[name].append(one)
            print(
                f"turn {turn + 1}, {name}: {one.took * 1e3:.3f} ms, {one.used * 1e3:.3f} ms of a processor", flush=True
            )
    for what in ("took", "used"):
        bare, watched = ([getattr(one, what) for one in times[name]] for name in ("bare", "watched"))
        print(spread({"took": "a step", "used": "of a processor"}[what], bare, watched))


if __name__ == "__main__":
    main()
