"""What 16-bit gradients on the wire save, and what they cost: digits on one server and two workers.

    python bench/wire_dtype.py --steps=300

Trains lenet with each type of ``--wire_dtype`` from the same seeds, evaluates it on the held-out fifth, and prints the
last loss, the accuracy and the bytes that a worker sent.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile

_LOSS = re.compile(r"^\d+\timages/sec: .*\t([0-9.]+|nan)$", re.MULTILINE)
_LINKS = re.compile(r"([0-9.]+) MB sent, ([0-9.]+) MB received")
_ACCURACY = re.compile(r"Accuracy @ 1 = ([0-9.]+)")
_RUN_SECONDS = 600
_COMMON = ("--device=cpu", "--model=lenet", "--data_name=digits", "--num_threads=1")


def bench(*flags: str) -> str:
    """What ``lockstep bench FLAGS`` prints."""
    command = [sys.executable, "-m", "lockstep", "bench", *_COMMON, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_SECONDS, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def row(name: str, steps: int, seed: int) -> str:
    """Train, evaluate, and return a row of results."""
    with tempfile.TemporaryDirectory() as folder:
        told = bench(
            *("--ps=1", "--workers=2", "--batch_size=16", "--optimizer=momentum", "--init_learning_rate=0.01"),
            *(f"--num_batches={steps}", "--num_warmup_batches=1", f"--seed={seed}", "--verbose"),
            *(f"--wire_dtype={name}", f"--train_dir={folder}"),
        )
        accuracy = _ACCURACY.findall(bench("--eval", f"--train_dir={folder}"))[-1]
    sent, received = _LINKS.findall(told)[0]
    return f"| {name} | {seed} | {_LOSS.findall(told)[-1]} | {accuracy} | {sent} | {received} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    asked = parser.parse_args()
    print("| on the wire | seed | last loss | accuracy | MB sent | MB received |\n|---|---|---|---|---|---|")
    for seed in asked.seeds:
        for name in ("float32", "bfloat16", "float16"):
            print(row(name, asked.steps, seed), flush=True)


if __name__ == "__main__":
    main()
