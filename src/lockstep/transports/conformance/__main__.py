"""Command line of the suite."""

from __future__ import annotations

import argparse
import sys

from lockstep.transports.conformance.forks import Forks
from lockstep.transports.conformance.processes import own_address_towards
from lockstep.transports.conformance.suite import Outcome, run_suite
from lockstep.transports.registry import known_transports


def _line(outcome: Outcome) -> str:
    verdict = "FAILED" if outcome.failure else "ok"
    line = f"{verdict:6}  {outcome.seconds:6.2f} s  {outcome.case.title}\n"
    return line + (f"        {outcome.failure}\n" if outcome.failure else "")


def _part(text: str) -> tuple[int, int]:
    """``K/N``, with K from 1 to N."""
    which, _, parts = text.partition("/")
    if not (which.isdecimal() and parts.isdecimal() and 1 <= int(which) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is not a part; write, for example, 1/2")
    return int(which), int(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep.transports.conformance", description=__doc__)
    parser.add_argument("transport", choices=known_transports())
    parser.add_argument("--large", action="store_true", help="also run the cases that take gigabytes")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    parser.add_argument("--inn", default="", metavar="HOST:PORT", help="run the second node there (see inn.py)")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="only the K-th of N parts")
    options = parser.parse_args()
    if options.inn:
        try:
            own_address_towards(options.inn)
        except (OSError, ValueError) as error:
            parser.error(f"--inn={options.inn} cannot be reached ({error}); start inn.py there first")
    failed = total = 0
    forks = Forks()  # before there are threads
    chosen = {"large": options.large, "only": options.only, "inn": options.inn, "part": options.part}
    for outcome in run_suite(options.transport, **chosen, forks=forks):
        sys.stdout.write(_line(outcome))
        sys.stdout.flush()
        total += 1
        failed += bool(outcome.failure)
    forks.close()
    sys.stdout.write(f"{options.transport}: {total - failed} of {total} cases passed\n")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main())
