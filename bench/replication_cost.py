"""What second homes cost a step: two jobs, with and without ``--server_replicas=1``, take turns of a second.

``python bench/replication_cost.py`` (two servers, two workers, momentum: alexnet with 16 images, trivial with 32). How
much longer a step takes, and how much more processor time, each with its 95 % interval (``stopped_turns.py``). The same
job, started again, may be a tenth faster or slower throughout: so both are started several times, and the median of
these pairs counts, with its range.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from rates import Case
from stopped_turns import Pair, interval, more, running, take_turns

CASES = (Case("alexnet", 16, 1_000_000), Case("trivial", 32, 1_000_000))
WARM_TURNS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="how often both jobs are started")
    parser.add_argument("--turns", type=int, default=20, help="of each job in a pair")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--models", default="alexnet,trivial")
    parser.add_argument("--protocol", default="auto")
    asked = parser.parse_args()
    shape = ("--ps=2", "--workers=2", "--optimizer=momentum", f"--server_protocol={asked.protocol}")
    for case in (case for case in CASES if case.model in asked.models.split(",")):
        flags = (*shape, *case.flags())
        longer, work = [], []
        for number in range(asked.pairs):
            with running(*flags) as plain, running(*flags, "--server_replicas=1") as replicated:
                pairs = take_turns(plain, replicated, asked.turns + WARM_TURNS, asked.seconds)[WARM_TURNS:]
            longer.append(more(pairs, "seconds"))
            work.append(more(pairs, "processor"))
            print(f"pair {number + 1}: {_each(pairs, 0)} without, {_each(pairs, 1)} with: longer by", end=" ")
            print(f"{_more(pairs, 'seconds')}, processor time {_more(pairs, 'processor')}", flush=True)
        print(f"{case.model}, batch {case.batch}: a step takes longer by {_spread(longer)}", end=" ")
        print(f"and {_spread(work)} more processor time", flush=True)


def _each(pairs: Sequence[Pair], which: int) -> str:
    turns = [pair[which] for pair in pairs]
    steps = sum(turn.steps for turn in turns)
    seconds, processor = (sum(values) for values in zip(*((t.seconds, t.processor) for t in turns), strict=True))
    return f"{seconds / steps * 1000:.1f} ms ({processor / steps * 1000:.1f} of processors) a step in {steps:.0f}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def _more(pairs: Sequence[Pair], what: str) -> str:
    low, high = interval(pairs, what)
    return f"{more(pairs, what):.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
