"""What second homes cost a step: images per second with and without ``--server_replicas=1``, in turns.

``python bench/replication_cost.py`` (two servers, two workers, momentum: alexnet with 16 images, trivial with 32). Each
turn runs one after the other, so that whatever else the machine does meets both; the median of the ratios counts.
"""

from __future__ import annotations

import argparse
import resource
import statistics

from rates import Case, rate, spread, start

CASES = (Case("alexnet", 16, 30), Case("trivial", 32, 400))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default="alexnet,trivial")
    parser.add_argument("--protocol", default="auto")
    asked = parser.parse_args()
    shape = ("--ps=2", "--workers=2", "--optimizer=momentum", f"--server_protocol={asked.protocol}")
    for case in (case for case in CASES if case.model in asked.models.split(",")):
        plain, replicated, work = [], [], []
        for _ in range(asked.repeats):
            before = _processor_seconds()
            plain.append(rate(start(*shape, *case.flags())))
            between = _processor_seconds()
            replicated.append(rate(start(*shape, *case.flags(), "--server_replicas=1")))
            work.append((_processor_seconds() - between) / (between - before) - 1)
        longer = [one / other - 1 for one, other in zip(plain, replicated, strict=True)]
        print(f"{case.model}, batch {case.batch}: without {spread(plain)} images/sec, with {spread(replicated)}")
        print(f"  a step takes longer by {statistics.median(longer):.1%} ({min(longer):.1%} to {max(longer):.1%})")
        print(f"  and {statistics.median(work):.1%} more processor time, the start of all tasks included")


def _processor_seconds() -> float:
    """Of all runs so far: what a busy machine changes less than the clock's seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
