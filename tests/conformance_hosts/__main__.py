"""Run the conformance suite for one transport, print a table, and exit with 0 or 1."""

from __future__ import annotations

import argparse
import sys

from conformance_hosts.forks import Forks
from conformance_hosts.hosts import Forked, There
from lockstep.transports.conformance import CaseOutcome, run_suite
from lockstep.transports.registry import known_transports


def _line(outcome: CaseOutcome) -> str:
    verdict = "FAILED" if outcome.failure else "ok"
    line = f"{verdict:6}  {outcome.seconds:6.2f} s  {outcome.case.title}\n"
    return line + (f"        {outcome.failure}\n" if outcome.failure else "")


def _part(text: str) -> tuple[int, int]:
    """``K/N``, with K from 1 to N."""
    which, _, parts = text.partition("/")
    if not (which.isdecimal() and parts.isdecimal() and 1 <= int(which) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} does not name a part; write, for example, 1/2")
    return int(which), int(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance_hosts", description=__doc__)
    parser.add_argument("transport", choices=known_transports())
    parser.add_argument("--large", action="store_true", help="also run the cases that need gigabytes of memory")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases whose names contain TEXT")
    parser.add_argument(
        "--node_host", default="", metavar="HOST:PORT", help="start the second node there (see node_host.py)"
    )
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="run only part K of N")
    options = parser.parse_args()
    failed = total = 0
    forks = Forks()  # before there are threads
    try:
        hosts = There(options.node_host) if options.node_host else Forked(forks)
    except (OSError, ValueError) as error:
        parser.error(f"cannot reach --node_host={options.node_host} ({error}); start node_host.py there first")
    for outcome in run_suite(options.transport, hosts, large=options.large, only=options.only, part=options.part):
        sys.stdout.write(_line(outcome))
        sys.stdout.flush()
        total += 1
        failed += bool(outcome.failure)
    forks.close()
    sys.stdout.write(f"{options.transport}: {total - failed} of {total} cases passed\n")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main())
