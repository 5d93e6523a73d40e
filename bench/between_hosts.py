"""All figures of docs/networks.md, in one command: hosts are network namespaces of this machine. Needs root, and quiet.

    python bench/between_hosts.py [--folder=between-hosts] [--only=net,compare,slow,chaos] [--repeats=3]
                                  [--tf_cnn_benchmarks=FOLDER --tf_python=PATH]

- ``net``: ``lockstep net`` between two hosts, a bare socket beside ``grpc+tcp`` and ``grpc+ucx``
- ``compare``: ``lockstep compare --hosts=namespaces`` for alexnet (16), trivial (32) and resnet50 (8)
- ``slow``: ``bench/slow_network.py``, 1 Gbit/s with 0.1 to 10 ms of delay and loss, beside the model
- ``chaos``: ``bench/chaos.py``, five seeds over ``grpc+tcp``, the same bits

Every output goes to a file of its own in the folder, and the end of it to the terminal. It takes about an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.benchmark.compare.run_hosts import made_hosts
from lockstep.runtime.host_network import why_not

BENCH = Path(__file__).resolve().parent
LOCKSTEP = (sys.executable, "-m", "lockstep")
PORT = 4600
MODELS = {
    "alexnet": ("--batch_size=16", "--num_batches=10", "--num_warmup_batches=3"),
    "trivial": ("--batch_size=32", "--num_batches=200", "--num_warmup_batches=10"),
    "resnet50": ("--batch_size=8", "--num_batches=4", "--num_warmup_batches=2", "--data_format=NHWC"),
}
_TAIL = 40


def run_to_file(path: Path, command: Sequence[str]) -> None:
    print(f"\n$ {' '.join(command)}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    path.write_text(done.stdout)
    print("\n".join(done.stdout.splitlines()[-_TAIL:]), flush=True)
    if done.returncode:
        print(f"it ended with exit code {done.returncode}; all of its output is in {path}", flush=True)


def net(asked: argparse.Namespace) -> None:
    with made_hosts(1, 1) as hosts:
        here, there = hosts.servers[0], hosts.workers[0]
        serve = [*there.prefix, *LOCKSTEP, "net", f"--serve={there.address}:{PORT}"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as serving:
            assert serving.stdout is not None
            serving.stdout.readline()  # it listens
            try:
                measured = [*here.prefix, *LOCKSTEP, "net", f"{there.address}:{PORT}", "--only=TCP,grpc+tcp,grpc+ucx"]
                measured += ["--min_size=65536"]
                run_to_file(asked.folder / "net.txt", [*measured, f"--json={asked.folder / 'net.json'}", "--rounds=11"])
            finally:
                serving.terminate()


def compare(asked: argparse.Namespace) -> None:
    for model, flags in MODELS.items():
        command = [*LOCKSTEP, "compare", "--hosts=namespaces", f"--model={model}", *flags, "--device=cpu"]
        command += ["--num_threads=1", f"--repeats={asked.repeats}", f"--json={asked.folder / f'{model}.json'}"]
        if asked.tf_cnn_benchmarks:
            command += [f"--tf_cnn_benchmarks={asked.tf_cnn_benchmarks}", f"--tf_python={asked.tf_python}"]
        run_to_file(asked.folder / f"{model}.txt", command)


def slow(asked: argparse.Namespace) -> None:
    for model, batch in (("trivial", 32), ("alexnet", 16)):
        command = [sys.executable, str(BENCH / "slow_network.py"), f"--model={model}", f"--batch={batch}"]
        command += ["--losses=0,0.01,0.1", f"--json={asked.folder / f'slow-{model}.json'}"]
        run_to_file(asked.folder / f"slow-{model}.txt", [*command, f"--steps={12 if model == 'trivial' else 4}"])


def chaos(asked: argparse.Namespace) -> None:
    command = [sys.executable, str(BENCH / "chaos.py"), "--seeds=5", "--protocol=grpc+tcp"]
    run_to_file(asked.folder / "chaos.txt", command)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"net": net, "compare": compare, "slow": slow, "chaos": chaos}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("between-hosts"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tf_cnn_benchmarks", default="")
    parser.add_argument("--tf_python", default=sys.executable)
    asked = parser.parse_args()
    if missing := why_not():
        sys.exit(f"hosts cannot be made here: {missing}")
    unknown = set(asked.only.split(",")) - PARTS.keys()
    if unknown:
        sys.exit(f"--only={','.join(sorted(unknown))} is not known; use one or more of: {', '.join(PARTS)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.only.split(","):
        PARTS[name](asked)


if __name__ == "__main__":
    main()
