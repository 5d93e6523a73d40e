"""One server and two workers over plain gRPC, compared with two workers that do not communicate.

    python bench/grpc_table.py [--repeats=3] [--protocol=grpc] [--case=resnet50]

Both run in turns, so that a noisy machine disturbs both; the ratio is computed within each turn.
"""

from __future__ import annotations

import argparse
import statistics

from rates import Case, cluster_rate, limit_rate, spread

CASES = (Case("trivial", 32, 150), Case("alexnet", 16, 12), Case("resnet50", 8, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--protocol", default="grpc", help="a name of --server_protocol")
    parser.add_argument("--case", default="", help="only the models whose name contains this")
    arguments = parser.parse_args()
    print("| model (batch) | no communication, images/s | one server + two workers | vs. no communication |")
    print("|---|---|---|---|")
    for case in CASES:
        if arguments.case in case.model:
            print(_row(case, arguments.protocol, arguments.repeats), flush=True)


def _row(case: Case, protocol: str, repeats: int) -> str:
    limits, rates = [], []
    for _ in range(repeats):
        limits.append(limit_rate(case))
        rates.append(cluster_rate(case, f"--server_protocol={protocol}"))
    ratios = [ours / limit for ours, limit in zip(rates, limits, strict=True)]
    share = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {case.model} ({case.batch}) | {spread(limits)} | {spread(rates)} | {share} |"


if __name__ == "__main__":
    main()
