"""Two versions of this program, in turns, on the same machine: is the new one as fast as the old one?

    git worktree add ../before COMMIT
    python bench/two_trees.py ../before . --model=trivial --batch_size=32 --pairs=12
    python bench/two_trees.py . . --flags=--server_protocol=grpc --after_flags=--require_private

Each pair runs a server and two workers from either tree, one after the other, and the order changes from pair to pair.
What counts is the ratio of a pair: a machine that others use is slow for both. With ``--cores=0-3,4-7`` both run at the
same moment, each on its own cores, and change places from pair to pair: then neither a slow minute nor a slow core
counts. The 95 % interval of the mean ratio comes from resampling the pairs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_TOTAL = re.compile(r"^total images/sec: ([0-9.]+)$", re.MULTILINE)
_RESAMPLES = 10_000


def images_per_second(tree: Path, flags: list[str], cores: str | None = None) -> float:
    """One run of a cluster on this machine, from the sources of ``tree``."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", "bench", "--ps=1", "--workers=2", "--device=cpu", *flags]
    if cores is not None:
        command = ["taskset", "--cpu-list", cores, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    found = _TOTAL.search(done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{tree} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(found[1])


def in_turns(trees: dict[str, Path], order: tuple[str, str], flags: dict[str, list[str]]) -> dict[str, float]:
    """One pair: the second runs when the first has ended."""
    return {name: images_per_second(trees[name], flags[name]) for name in order}


def at_once(
    trees: dict[str, Path], order: tuple[str, str], flags: dict[str, list[str]], cores: str
) -> dict[str, float]:
    """One pair at the same moment: the first of ``order`` on the first set of cores, the other on the second."""
    places = dict(zip(order, cores.split(","), strict=True))
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {name: pool.submit(images_per_second, trees[name], flags[name], places[name]) for name in order}
        return {name: run.result() for name, run in runs.items()}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where the mean lies with 95 %."""
    chance = random.Random(1)
    means = sorted(statistics.fmean(chance.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return means[_RESAMPLES // 40], means[-_RESAMPLES // 40]


def main() -> None:
    """Print each pair, then the mean ratio with its interval."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="trivial")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_batches", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--flags", default="", help="more flags of lockstep bench, separated by spaces")
    parser.add_argument("--after_flags", default="", help="the same for the second tree only")
    parser.add_argument("--cores", help="two sets of cores, as 0-3,4-7: both trees run at once")
    asked = parser.parse_args()
    flags = [f"--model={asked.model}", f"--batch_size={asked.batch_size}", f"--num_batches={asked.num_batches}"]
    flags += ["--num_threads=1", "--display_every=1000000", *asked.flags.split()]
    of_each = {"before": flags, "after": [*flags, *asked.after_flags.split()]}
    trees = {"before": asked.before.resolve(), "after": asked.after.resolve()}
    ratios = []
    for pair in range(asked.pairs):
        order = ("before", "after") if pair % 2 == 0 else ("after", "before")
        speed = in_turns(trees, order, of_each) if asked.cores is None else at_once(trees, order, of_each, asked.cores)
        ratios.append(speed["after"] / speed["before"])
        print(f"pair {pair + 1}: before {speed['before']:.1f}, after {speed['after']:.1f}, ratio {ratios[-1]:.3f}")
    low, high = interval(ratios)
    print(f"{asked.model} ({asked.batch_size}): after/before {statistics.fmean(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
