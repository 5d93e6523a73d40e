"""What ``lockstep watch`` costs a training step: the same DDP job with it and without, in turns.

    python bench/watch_cost.py [--system=ddp] [--steps=2000] [--turns=5] [--pause=0.004]

Three ranks over gloo; ``--pause`` makes a step of about 5 ms, as a GPU would. The times are of rank 0's steps, without
start and warm-up. On a busy machine more turns help; the quickest turn of each says most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from lockstep.drill.systems import SYSTEMS, torchrun

WARM_UP = 100


def seconds_a_step(command: list[str]) -> float:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    line = next(line for line in done.stdout.splitlines() if line.endswith("s a step"))
    return float(line.split()[0])


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
    times: dict[str, list[float]] = {"bare": [], "watched": []}
    for turn in range(args.turns):
        for name, command in (("bare", job), ("watched", watch)):
            times[name].append(seconds_a_step(command))
            print(f"turn {turn + 1}, {name}: {times[name][-1] * 1e3:.3f} ms a step", flush=True)
    for name, pick in (("median", statistics.median), ("quickest", min)):
        bare, watched = pick(times["bare"]), pick(times["watched"])
        print(f"{name}: {bare * 1e3:.3f} ms bare, {watched * 1e3:.3f} ms watched, {watched / bare - 1:+.1%}")


if __name__ == "__main__":
    main()
