"""What journal, watchdog and metrics cost: records per step times nanoseconds per record; runs with and without them.

    python bench/journal_cost.py [--model=alexnet] [--pairs=10] [--steps=4] [--quick] [--metrics]

Four measurements. The first counts the records of one step on a worker and on a server, and times one record. The
second times the checks of the watchdogs. The third times what metrics add to these checks, and one scrape, with both
ends and the handshake (with ``--metrics`` it is the only one). The fourth runs the same job in turn with both on and
with both off (the journal's ``record`` and the watchdog's check replaced by nothing), in one process with real nodes
and sockets, and gives the difference with a confidence interval of 95 %: once on the model, once on a step of about two
milliseconds without torch. Time is processor time of the whole process, all tasks of the job in it: on a machine that
others use too, wall time says more about them than about us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.cluster import InProcessCluster, in_process_cluster
from lockstep.drill.task import PlainStore
from lockstep.protocol.core.ids import CHIEF, ClusterShape, worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import GroupRates, Layout, ParameterEntry
from lockstep.protocol.core.plan import make_plan
from lockstep.runtime.task.node import Node
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.trace.step_tally import StepTally
from lockstep.runtime.watch.metrics import metrics_of
from lockstep.runtime.watch.watchdog import Watchdog
from lockstep.transports.control.monitor_client import fetch_metrics

SCRAPE_SECONDS = 15.0
"""How often Prometheus asks, if nobody says otherwise in a rule of its own."""


@dataclass(frozen=True)
class Difference:
    """Relative cost in percent: the median of all pairs, and its 95 % interval, by rank.

    Threads settle into faster and slower patterns of switching, so a few pairs are far off; a mean would show them
    and not the cost.
    """

    percent: float
    low: float
    high: float
    off_ms: float


def nanoseconds_a_record(count: int = 200_000) -> float:
    """One record into a full ring, as the loop writes it."""
    journal, peer = Journal(), worker(1)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for number in range(count):
            journal.record(1.0, Happening.ARRIVED, number, 3, peer)
        best = min(best, time.process_time() - began)
    return best / count * 1e9


def small_loop(node: WorkerNode, steps: int, on_step: Callable[[int], None]) -> None:
    """A training loop without torch whose step takes about two milliseconds."""
    entries = tuple(ParameterEntry(f"layer{i}.weight", 64, "float32", 0) for i in range(3))
    node.wait_until_member()
    plan = make_plan(entries, 1, 256)
    node.allocate(plan)
    node.announce(Layout(plan.hash, 256, entries, ()))
    if node.task == CHIEF:
        node.offer_initial()
    node.wait_version(0)
    rates = (GroupRates(("lr",), (0.1,)),) if node.task == CHIEF else ()
    for step in range(steps):
        on_step(step)
        node.begin_step(step, rates)
        for bucket in plan.buckets:
            node.produced(step, bucket.id)
        node.seal(step)
        node.wait_version(step + 1)
    on_step(steps)
    node.finish(steps)


class Switched:
    """Turns journal and watchdog on and off while nodes run: a patch of the classes, undone at the end."""

    def __init__(self) -> None:
        self._record, self._tick = Journal.record, Watchdog._tick

    @property
    def _step_ends_only(self) -> Callable[..., None]:
        """One record per step is kept, or a watchdog that is switched on again would conclude that nothing moved."""
        keep, record = (Happening.SEALED, Happening.COMMITTED), self._record

        def mostly_nothing(journal: Journal, now: float, happening: Happening, *rest: object, **more: object) -> None:
            if happening in keep:
                record(journal, now, happening, *rest, **more)  # type: ignore[arg-type]  # passed on as they came

        return mostly_nothing

    def set(self, on: bool) -> None:
        if on:
            Journal.record, Watchdog._tick = self._record, self._tick  # type: ignore[method-assign]
        else:
            Journal.record = self._step_ends_only  # type: ignore[method-assign]
            Watchdog._tick = lambda *_: None  # type: ignore[method-assign]


def measure(run: Callable[[Callable[[int], None], int], None], pairs: int, block: int) -> Difference:
    """Blocks of steps in one run, on and off in turn (on-off, off-on, ...): drift affects both equally."""
    switched, marks = Switched(), [0.0] * (2 * pairs * block + block + 1)
    order = [(pair + half) % 2 == 0 for pair in range(pairs) for half in range(2)]

    def on_step(step: int) -> None:
        marks[step] = time.process_time()
        if step >= block and (step - block) % block == 0 and (step - block) // block < len(order):
            switched.set(order[(step - block) // block])

    try:
        run(on_step, len(marks) - 1)
    finally:
        switched.set(True)
    blocks = []
    for index in range(2 * pairs):
        first = block * (index + 1)
        blocks.append((order[index], (marks[first + block] - marks[first]) / block))
    ratios, offs = [], []
    for pair in range(pairs):
        both = dict(blocks[2 * pair : 2 * pair + 2])
        ratios.append(100 * (both[True] / both[False] - 1))
        offs.append(both[False] * 1000)
    ratios.sort()
    away = round(0.98 * pairs**0.5)
    low, high = ratios[max(0, pairs // 2 - away)], ratios[min(pairs - 1, (pairs - 1) // 2 + away)]
    return Difference(statistics.median(ratios), low, high, statistics.median(offs))


def run_small(on_step: Callable[[int], None], steps: int) -> None:
    with in_process_cluster(ClusterShape(1, 2), PlainStore) as cluster:
        _run_long(cluster, lambda node: small_loop(node, steps, on_step if node.task == CHIEF else lambda _: None))


def records_a_step(steps: int = 50) -> dict[str, float]:
    """How many records one step of the small loop leaves, by task."""
    with in_process_cluster(ClusterShape(1, 2), PlainStore) as cluster:
        cluster.run(lambda node: small_loop(node, steps, lambda _: None))
        return {node.task.short: node.journal.total / steps for node in cluster.nodes()}


def watchdog_share(steps: int = 2000) -> tuple[float, float]:
    """Processor microseconds of one check of a watchdog, and the share of a core that it takes, in percent."""
    tick, spent = Watchdog._tick, list[float]()

    def timed(watchdog: Watchdog, now: float) -> None:
        began = time.thread_time()
        tick(watchdog, now)
        spent.append(time.thread_time() - began)

    Watchdog._tick = timed  # type: ignore[method-assign,assignment]
    began = time.monotonic()
    try:
        run_small(lambda _: None, steps)
    finally:
        Watchdog._tick = tick  # type: ignore[method-assign]
    tasks = 3
    share = 100 * sum(spent) / tasks / (time.monotonic() - began)
    return statistics.mean(spent) * 1e6, share


@dataclass(frozen=True)
class MetricsCost:
    """Processor time of all tasks: what counting adds to a step, and the step itself; of one scrape, both ends."""

    counting_us: float
    step_ms: float
    scrape_ms: float

    @property
    def percent(self) -> float:
        """Of the step."""
        return 100 * self.counting_us / 1000 / self.step_ms


def metrics_cost(steps: int = 2000, scrapes: int = 100) -> MetricsCost:
    """What counting costs in every step, and what a scrape costs besides."""
    read, spent = StepTally.read, list[float]()

    def timed(tally: StepTally, *what: object) -> None:
        began = time.thread_time()
        read(tally, *what)  # type: ignore[arg-type]  # passed on as they came
        spent.append(time.thread_time() - began)

    StepTally.read = timed  # type: ignore[method-assign,assignment]
    try:
        with in_process_cluster(ClusterShape(1, 2), PlainStore) as cluster:
            for node in cluster.nodes():
                metrics_of(node)
            busy = time.process_time()
            _run_long(cluster, lambda node: small_loop(node, steps, lambda _: None))
            step_ms = (time.process_time() - busy) / steps * 1000
            addresses = [node.reporter.report.task_address for node in cluster.nodes()]
            busy = time.process_time()
            for number in range(scrapes):
                fetch_metrics(addresses[number % len(addresses)], 5.0)
            scrape_ms = (time.process_time() - busy) / scrapes * 1000
    finally:
        StepTally.read = read  # type: ignore[method-assign]
    return MetricsCost(sum(spent) / steps * 1e6, step_ms, scrape_ms)


def run_model(model: str, batch: int) -> Callable[[Callable[[int], None], int], None]:
    """The benchmark's own loop on one worker and one server, so that on a small machine the step is the model's."""

    def run(on_step: Callable[[int], None], steps: int) -> None:
        import torch

        from lockstep.benchmark.settings.config import BenchConfig, RunLength, resolved
        from lockstep.benchmark.training.job import BenchJob
        from lockstep.training.server.shard_store import TorchShardStore
        from lockstep.training.worker.replica import Replica

        torch.set_num_threads(1)
        config = resolved(BenchConfig(model=model, run=RunLength(batch_size=batch, num_batches=steps)))

        def train(node: WorkerNode) -> None:
            job = BenchJob(config, node.task.index, [torch.device("cpu")])
            node.wait_until_member()
            replica = Replica(node, job.trained, job.optimizers(), 4 << 20, own_copy=False)
            replica.start()
            for step in range(steps):
                on_step(step)
                replica.begin(step, job.rates(step))
                job.forward().backward()
                replica.end()
            on_step(steps)
            replica.close()
            node.finish(steps)

        with in_process_cluster(ClusterShape(1, 1), TorchShardStore) as cluster:
            _run_long(cluster, train)

    return run


def _run_long(cluster: InProcessCluster, train: Callable[[WorkerNode], None]) -> None:
    threads = [threading.Thread(target=train, args=(node,)) for node in cluster.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = [node for node in cluster.nodes() if isinstance(node, Node) and node.outcome and not node.outcome.ok]
    if bad:
        raise RuntimeError(str(bad[0].outcome))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps of the model in one block")
    parser.add_argument("--quick", action="store_true", help="only the part without torch")
    parser.add_argument("--metrics", action="store_true", help="only what metrics cost")
    asked = parser.parse_args()
    found = metrics_cost()
    print(
        f"metrics: {found.counting_us:.1f} us of processor time per step of {found.step_ms:.2f} ms: "
        f"{found.percent:.2f} %; one scrape: {found.scrape_ms:.1f} ms, {found.scrape_ms / 10 / SCRAPE_SECONDS:.3f} % "
        f"of a core every {SCRAPE_SECONDS:g} s"
    )
    if asked.metrics:
        return
    cost, counts = nanoseconds_a_record(), records_a_step()
    print(f"one record: {cost:.0f} ns; records per step: {json.dumps(counts)}")
    most = max(counts.values())
    look, share = watchdog_share()
    print(f"one check of the watchdog: {look:.0f} us of processor time; one watchdog: {share:.3f} % of a core")
    small = measure(run_small, 10 * asked.pairs, 40)
    _print("step without torch", small, most * cost)
    if not asked.quick:
        model = measure(run_model(asked.model, asked.batch), asked.pairs, asked.steps)
        _print(asked.model, model, most * cost)


def _print(name: str, found: Difference, records_ns: float) -> None:
    share = records_ns / (found.off_ms * 1e6) * 100
    print(
        f"{name}: {found.off_ms:.2f} ms of processor time per step; on against off {found.percent:+.2f} % "
        f"(95 % interval {found.low:+.2f} to {found.high:+.2f}); records alone {share:.3f} %"
    )


if __name__ == "__main__":
    main()
