"""Runs every target in turn, then attacks the live ports of a small job and two servers; exit code 1 for a defect.

python -m fuzz [--seconds=600] [--seed=1] [--only=TEXT] [--list]        (in tests/; `make fuzz` does that)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator

from fuzz.covered import table
from fuzz.engine import Target, fuzz
from fuzz.file_targets import file_targets
from fuzz.live import attack
from fuzz.machine_targets import machine_targets
from fuzz.members import attack_member
from fuzz.servers import attack_net, attack_rendezvous
from fuzz.text_targets import text_targets
from fuzz.wire_targets import wire_targets

MEMORY = "/dev/shm"
LIVE_PART = 0.3
"""The live ports get this part of the time."""


_LIVE = ((0.35, attack), (0.35, attack_member), (0.15, attack_rendezvous), (0.15, attack_net))


def every_target(stack: contextlib.ExitStack) -> Iterator[Target]:
    wire = list(wire_targets())
    yield from wire
    yield from machine_targets(next(list(target.seeds) for target in wire if target.name == "control: Envelope"))
    yield from file_targets(stack)
    yield from text_targets()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same inputs")
    parser.add_argument("--only", default="", help="only targets whose name contains this; 'live' for the ports")
    parser.add_argument("--list", action="store_true", help="show what reads bytes of others, and what feeds it")
    asked = parser.parse_args()
    if asked.list:
        print(table())
        return 0
    print(f"seed {asked.seed}, {asked.seconds:g} s", flush=True)
    found = 0
    if os.access(MEMORY, os.W_OK):
        tempfile.tempdir = MEMORY  # some parsers write and sync files; a disk would leave time for a few inputs only
    with contextlib.ExitStack() as stack:
        targets = [target for target in every_target(stack) if asked.only in target.name]
        live = asked.only in "live ports"
        left = asked.seconds * (1 - LIVE_PART if live else 1)
        for place, target in enumerate(targets):
            begin = time.monotonic()
            done = fuzz(target, asked.seed, seconds=left / (len(targets) - place))
            left = max(0.0, left - (time.monotonic() - begin))
            found += len(done.defects)
            print(
                f"{target.name:<32} {done.inputs:>9} inputs, grew by {done.grown / (1 << 20):.1f} MiB, "
                f"the slowest took {done.slowest * 1000:.0f} ms, {len(done.defects)} defect(s)",
                flush=True,
            )
            for defect in done.defects:
                print(f"  {defect}", flush=True)
    if live:
        found += _live(asked.seed, asked.seconds * LIVE_PART)
    print(f"{found} defect(s)")
    return 1 if found else 0


def _live(seed: int, seconds: float) -> int:
    """How many problems there were."""
    found = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # a key of its own; the user's is not touched
        for part, attacks in _LIVE:
            problems = attacks(seed, seconds * part, lambda text: print(text, flush=True))
            found += len(problems)
            for problem in problems:
                print(f"  {problem}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
