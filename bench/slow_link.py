"""What overlap gains over a slow link: a whole cluster behind a network of a given rate, on one machine.

    python bench/slow_link.py --rate=1gbit --model=alexnet --batch=16 [--against=FOLDER] [--repeats=3]

The tasks run in their own network namespace, whose loopback device the kernel limits to ``--rate`` (both
directions together; needs root, ``unshare``, ``ip`` and ``tc``), with ``--server_protocol=grpc``. ``--against``: the
``src`` folder of another version, which runs in turns with this one. It prints the images per second of each, and their
ratio within each round.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rates import spread

_TOTAL = re.compile(r"^total images/sec: ([0-9.]+)$", re.MULTILINE)
_RUN_SECONDS = 900


def rate_of(source: Path, asked: argparse.Namespace) -> float:
    """Images per second of one run of the version in ``source``."""
    flags = [
        *(f"--ps={asked.servers}", f"--workers={asked.workers}", "--device=cpu", "--server_protocol=grpc"),
        *(f"--model={asked.model}", f"--batch_size={asked.batch}", f"--num_batches={asked.steps}"),
        *("--num_warmup_batches=2", "--num_threads=1", f"--display_every={asked.steps}"),
    ]
    command = shlex.join([sys.executable, "-m", "lockstep", "bench", *flags])
    limit = f"tc qdisc add dev lo root tbf rate {asked.rate} burst 4mb latency 200ms"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f"ip link set lo up && {limit} && exec {command}"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
        check=False,
    )
    found = _TOTAL.search(done.stdout)
    if done.returncode or found is None:
        sys.exit(f"a run failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="as tc writes it")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, default=None, help="the src folder of another version")
    asked = parser.parse_args()
    ours = Path(__file__).resolve().parents[1] / "src"
    here: list[float] = []
    there: list[float] = []
    for _ in range(asked.repeats):
        if asked.against is not None:
            there.append(rate_of(asked.against.resolve(), asked))
        here.append(rate_of(ours, asked))
    print(f"{asked.model} {asked.batch}, {asked.workers} worker(s), {asked.servers} server(s), {asked.rate}:")
    print(f"  this version   {spread(here, 2)} images/sec")
    if there:
        print(f"  {asked.against}   {spread(there, 2)} images/sec")
        ratios = [one / other for one, other in zip(here, there, strict=True)]
        print(f"  ratio          {spread(ratios, 3)}")


if __name__ == "__main__":
    main()
