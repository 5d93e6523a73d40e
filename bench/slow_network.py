"""How long a step takes on a slow network, beside what the simulator's capacity model predicts for it.

    python bench/slow_network.py [--model=trivial] [--batch=32] [--rate=1] [--delays=0.1,1,10] [--losses=0,0.01]
                                 [--protocol=auto] [--servers=1] [--workers=2] [--steps=12] [--repeats=1] [--json=FILE]

Every task is on a host of its own (``slow_hosts.py``; needs root): ``--rate`` in Gbit/s, ``--delays`` in milliseconds
one way, ``--losses`` in percent of the packets. The model gets the rate less the headers of TCP and Ethernet, the
delay, and how long the workers of the same run computed, because all hosts share the processors of this machine; it
knows nothing of loss. A ratio is the measured time over the predicted one; the aim is 0.85 to 1.15 without loss. The
forwarder's share of a core is printed, because it is taken from what is measured. With
``--congestion=bbr`` connections do not begin slowly after a pause, which the model is told too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.benchmark.compare.contestants import Contestant, ContestantKind
from lockstep.benchmark.compare.programs import Programs
from lockstep.benchmark.compare.results import Measurement
from lockstep.benchmark.compare.run_hosts import RunHosts
from lockstep.benchmark.compare.runs import OneRun
from lockstep.cli.compare_flags import parse_compare
from lockstep.cli.sim_capacity import parameters_of
from lockstep.runtime.host_network import why_not
from lockstep.sim.capacity import CapacityCase, CapacityMeasurement, measure
from slow_hosts import SlowHosts, Slowness

LEFT_BY_HEADERS = 1448 / 1538
"""What Ethernet, IP and TCP leave of a rate for data, in packets of 1,500 bytes."""
_RUN_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class SlowRow:
    """One network: what was measured there, and what was predicted, in seconds of a step."""

    slowness: Slowness
    measured: float
    predicted: float
    forwarder: float
    """Its share of a core."""
    measured_parts: dict[str, float]
    predicted_parts: dict[str, float]

    def lines(self) -> list[str]:
        slow, ratio = self.slowness, self.measured / self.predicted
        network = f"{1e3 * slow.delay:9g} {100 * slow.loss:7g}"
        times = f"{1e3 * self.measured:12.0f} {1e3 * self.predicted:13.0f} {ratio:6.2f}"
        return [
            f"{network} {times} {self.forwarder:10.2f}",
            f"{'measured:':>27} {_in_words(self.measured_parts)}",
            f"{'predicted:':>27} {_in_words(self.predicted_parts)}",
        ]


def _in_words(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())


class Lab:
    """Runs of one comparison on slow networks."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        flags = [f"--model={asked.model}", f"--batch_size={asked.batch}", f"--num_batches={asked.steps}"]
        flags += [f"--ps={asked.servers}", f"--workers={asked.workers}", "--num_warmup_batches=2", "--num_threads=1"]
        self._comparison = parse_compare([*flags, "--device=cpu"], os.environ).comparison

    def _run(self, contestant: Contestant, slowness: Slowness) -> tuple[Measurement, float]:
        """One run, and the forwarder's share of a core."""
        comparison, deadline = self._comparison, time.monotonic() + _RUN_SECONDS
        network = SlowHosts(comparison.servers + comparison.workers, slowness, self._asked.congestion)
        with network, tempfile.TemporaryDirectory(prefix="slow-network-") as folder:
            hosts = RunHosts(network.hosts[: comparison.servers], network.hosts[comparison.servers :])
            with Programs(Path(folder), os.environ) as programs:
                found = OneRun(comparison, programs, hosts, deadline).of(contestant)
        if not found.images_per_second:
            sys.exit(f"a run gave no number: {found.failure or found.cannot}")
        return found, network.share

    def _step_seconds(self, found: Measurement) -> float:
        return self._comparison.workers * self._comparison.bench.run.batch_size / found.images_per_second

    def row(self, slowness: Slowness) -> SlowRow:
        contestant = Contestant(ContestantKind.LOCKSTEP, self._asked.protocol)
        runs = [self._run(contestant, slowness) for _ in range(self._asked.repeats)]
        runs.sort(key=lambda run: self._step_seconds(run[0]))
        found, forwarder = runs[len(runs) // 2]
        assert found.detail is not None
        assert found.detail.shares is not None
        shares = found.detail.shares
        predicted = self._predict(slowness, shares.computing + shares.others)
        parts = {name: seconds for name, seconds in asdict(shares).items() if name != "steps"}
        return SlowRow(slowness, self._step_seconds(found), predicted.step, forwarder, parts, predicted.parts)

    def _predict(self, slowness: Slowness, compute: float) -> CapacityMeasurement:
        asked = self._asked
        case = CapacityCase(
            workers=asked.workers,
            servers=asked.servers,
            parameters=parameters_of(asked.model),
            steps=4,
            bandwidth=slowness.rate / 8 * LEFT_BY_HEADERS,
            latency=slowness.delay,
            compute=compute,
            jitter=0.0,
            slow_start=asked.congestion != "bbr",  # it remembers its speed
        )
        return measure(case)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="trivial")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1.0, help="Gbit/s")
    parser.add_argument("--delays", default="0.1,1,10", help="milliseconds, one way")
    parser.add_argument("--losses", default="0,0.01", help="percent")
    parser.add_argument("--protocol", default="auto")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--congestion", default="reno", help="how TCP finds its speed: reno, cubic, bbr")
    parser.add_argument("--json", type=Path, default=None)
    return parser


def main() -> None:
    asked = options().parse_args()
    if missing := why_not():
        sys.exit(f"hosts cannot be made here: {missing}")
    lab = Lab(asked)
    size = f"{asked.servers} server(s), {asked.workers} workers"
    print(f"{asked.model} ({asked.batch}), {size}, {asked.rate:g} Gbit/s, {asked.protocol}")
    print(f"{'delay ms':>9} {'loss %':>7} {'measured ms':>12} {'predicted ms':>13} {'ratio':>6} {'forwarder':>10}")
    rows = []
    for delay in map(float, asked.delays.split(",")):
        for loss in map(float, asked.losses.split(",")):
            rows.append(lab.row(Slowness(asked.rate * 1e9, delay / 1e3, loss / 100)))
            print("\n".join(rows[-1].lines()), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
