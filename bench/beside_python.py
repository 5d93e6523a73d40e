"""What a transfer costs beside a thread that computes in Python: the table of docs/networks.md of that name.

    python bench/beside_python.py [--transfers=400] [--nbytes=65536] [--pause_ms=3] [--protocol=grpc+tcp]

Two processes on this machine, one transfer at a time; its latency is the time until the peer has answered that all
bytes are in place. The busy thread only counts, so it gives up the interpreter's lock when it is asked to, after
``sys.getswitchinterval()``, and never before. Each row has a peer of its own. Without ``--pause_ms`` a transfer follows
the one before at once, and a link's thread that has the lock may get it back before the busy thread has woken up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.transports.net import serving
from lockstep.transports.net.contenders import Linked
from lockstep.transports.net.measured import Measured
from lockstep.transports.net.measurement import local_peer

WARM_UP = 20
_PEER = "--as-peer"


@dataclass(frozen=True, slots=True)
class Row:
    """Where a thread is busy, and after how many seconds it gives up the lock; 0: Python's own number."""

    name: str
    here: bool = False
    there: bool = False
    switch_seconds: float = 0.0

    def peer(self) -> list[str]:
        """The peer of this row, as Python's arguments."""
        return [str(Path(__file__)), _PEER, str(int(self.there)), str(self.switch_seconds)]


ROWS = (
    Row("none"),
    Row("at the receiver", there=True),
    Row("at both ends", here=True, there=True),
    Row("at both ends, switch interval 0.5 ms", here=True, there=True, switch_seconds=0.0005),
)


@contextlib.contextmanager
def beside(busy: bool, switch_seconds: float) -> Iterator[None]:
    """Within the block this process has a busy thread, or none, and this switch interval."""
    before, over = sys.getswitchinterval(), threading.Event()
    thread = threading.Thread(target=_count, args=(over,), daemon=True)
    sys.setswitchinterval(switch_seconds or before)
    if busy:
        thread.start()
    try:
        yield
    finally:
        over.set()
        sys.setswitchinterval(before)
        if busy:
            thread.join()


def _count(over: threading.Event) -> None:
    number = 0
    while not over.is_set():
        for _ in range(1000):
            number += 1


def measure(row: Row, asked: argparse.Namespace) -> Measured:
    measured = Measured(asked.protocol, asked.nbytes)
    with (
        local_peer(program=row.peer()) as caller,
        contextlib.closing(Linked(caller, asked.protocol, asked.nbytes)) as link,
        beside(row.here, row.switch_seconds),
    ):
        for number in range(-WARM_UP, asked.transfers):
            time.sleep(asked.pause_ms / 1000)
            began = time.perf_counter()
            link.start(asked.nbytes)
            latency = link.finish() - began
            if number >= 0:
                measured.latencies.append(latency)
    return measured


def serve() -> None:
    """The peer: as in any measurement, beside what its row wants."""
    busy, switch_seconds = bool(int(sys.argv[2])), float(sys.argv[3])
    sys.argv[1:] = []
    with beside(busy, switch_seconds):
        serving.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", type=int, default=400)
    parser.add_argument("--nbytes", type=int, default=65536)
    parser.add_argument("--pause_ms", type=float, default=0.0, help="before each transfer")
    parser.add_argument("--protocol", default="grpc+tcp")
    asked = parser.parse_args()
    where = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{asked.protocol}, {asked.nbytes} bytes, {asked.transfers} transfers a row, {where}\n")
    print("| a busy thread | p50 µs | p99 µs |\n|---|---|---|")
    for row in ROWS:
        measured = measure(row, asked)
        print(f"| {row.name} | {measured.latency(0.5) * 1e6:,.0f} | {measured.latency(0.99) * 1e6:,.0f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_PEER]:
        serve()
    else:
        main()
