"""What a step costs over the size of the cluster: tiny compute, 64 MB of parameters, everything on one machine.

    python bench/cost_over_size.py [--workers 1 2 4 8] [--servers 1 2 4] [--steps=20] [--repeats=3] [--json=FILE]

Every row is a real cluster of ``lockstep bench`` (one process per task, ``auto``: shared memory). The model is four
linear layers of 16 MB each with one example per step, so that hardly anything is computed: memory costs the time. The
bytes that one step must move are those that no arrangement of the same work can avoid (``bytes_of_a_step``). They are
divided by the memory bandwidth of the whole machine, measured right before and after each run by copying large buffers
on all cores (read and written bytes both count). The last column is the time of a step divided by that quotient.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

RUN_SECONDS = 600
WARM_UP = 3
WIDTH, HIDDEN, LAYERS = 1024, 4096, 4
PARAMETER_BYTES = 4 * WIDTH * HIDDEN * LAYERS
COPIED_BYTES = 256 << 20
COPYING_SECONDS = 1.0


def model() -> nn.Module:
    """Four matrices of 16 MB: ``--model=cost_over_size:model``."""
    sizes = [WIDTH, *[HIDDEN, WIDTH] * (LAYERS // 2)]
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *layers)


model.image_size, model.input_channels = 8, WIDTH // 64  # type: ignore[attr-defined]  # read by `lockstep bench`


def bytes_of_a_step(workers: int) -> int:
    """The bytes that must move between memory and cores in one step, in whichever task.

    Each worker reads the parameters twice (forward, and backward for the gradient of a layer's input, which the first
    layer does not have) and writes its gradients once. Servers read the gradients of all workers, read the old
    parameters and write the new ones; plain SGD has no state. Sums of gradients fit a cache and loans need no copy.
    The lines that a processor reads before it overwrites them are not counted.
    """
    read_by_model = 2 * PARAMETER_BYTES - PARAMETER_BYTES // LAYERS
    return workers * (read_by_model + 2 * PARAMETER_BYTES) + 2 * PARAMETER_BYTES


def bandwidth(cores: int, seconds: float = COPYING_SECONDS) -> float:
    """Bytes read and written per second by copies on all cores at once."""
    buffers = [(torch.ones(COPIED_BYTES // 4), torch.ones(COPIED_BYTES // 4)) for _ in range(cores)]
    counts = [0] * cores
    until = time.perf_counter() + seconds

    def copy(number: int, source: Tensor, target: Tensor) -> None:
        while time.perf_counter() < until:
            target.copy_(source)
            counts[number] += 1

    threads = [threading.Thread(target=copy, args=(number, *pair)) for number, pair in enumerate(buffers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 2 * COPIED_BYTES * sum(counts) / (time.perf_counter() - began)


def seconds_of_a_step(servers: int, workers: int, steps: int, more: list[str]) -> float:
    """Run the cluster and return the slowest worker's average."""
    with tempfile.TemporaryDirectory(prefix="cost-over-size-") as folder:
        command = [
            *(sys.executable, "-m", "lockstep", "bench", f"--ps={servers}", f"--workers={workers}", "--device=cpu"),
            *("--model=cost_over_size:model", "--batch_size=1", "--num_threads=1", "--optimizer=sgd"),
            *("--weight_decay=0", f"--num_batches={steps}", f"--num_warmup_batches={WARM_UP}"),
            *(f"--display_every={steps}", "--init_learning_rate=1e-6", f"--timing_dir={folder}", *more),
        ]
        here = str(Path(__file__).resolve().parent)
        paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
        told = [json.loads(path.read_text()) for path in Path(folder).glob("worker-*.json")]
    return max(float(one["seconds_a_step"]) for one in told)


@dataclass(frozen=True, slots=True)
class Row:
    workers: int
    servers: int
    must_move_mb: float
    bandwidth_gb: list[float]
    step_ms: list[float]
    ratios: list[float]

    def line(self) -> str:
        ratio = f"{statistics.median(self.ratios):.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        step, rate = statistics.median(self.step_ms), statistics.median(self.bandwidth_gb)
        return f"| {self.workers} | {self.servers} | {self.must_move_mb:.0f} | {rate:.1f} | {step:.0f} | {ratio} |"


def measure(workers: int, servers: int, asked: argparse.Namespace) -> Row:
    must_move, cores = bytes_of_a_step(workers), len(os.sched_getaffinity(0))
    rates, steps, ratios = [], [], []
    for _ in range(asked.repeats):
        before = bandwidth(cores)
        step = seconds_of_a_step(servers, workers, asked.steps, asked.flags.split())
        rate = (before + bandwidth(cores)) / 2
        rates.append(rate / 1e9)
        steps.append(1e3 * step)
        ratios.append(step / (must_move / rate))
    return Row(workers, servers, must_move / 1e6, rates, steps, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", default="", help="further flags of lockstep bench, in one string")
    parser.add_argument("--json", default="", help="write all numbers to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| workers | servers | must move, MB | bandwidth, GB/s | step, ms | step over bytes / bandwidth |")
    print("|---|---|---|---|---|---|")
    rows = []
    for workers in asked.workers:
        for servers in asked.servers:
            rows.append(measure(workers, servers, asked))
            print(rows[-1].line(), flush=True)
    if asked.json:
        told = {"parameter_bytes": PARAMETER_BYTES, "steps": asked.steps, "rows": [asdict(row) for row in rows]}
        Path(asked.json).write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
