"""Thousands of transfers of random sizes in both directions, while the peer is killed or frozen every second.

``python -m conformance_hosts.soak grpc+shm`` prints what happened and exits with 0 or 1. It fails if a transfer
is not settled in time, if bytes are reported as arrived that were never sent, or if descriptors or threads are left.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from conformance_hosts.hosts import Here
from lockstep.transports.base import LinkDownError, TransportError
from lockstep.transports.conformance.events import CaseFailed, Heard, PeerHasEnded
from lockstep.transports.conformance.node import SuiteNode
from lockstep.transports.conformance.stage import Pair, RemoteVictim, Stage, Way, wait_until
from lockstep.transports.registry import known_transports

SLOT_BYTES: Final = 1 << 20
SLOTS: Final = 16
SETTLE_SECONDS: Final = 20.0
FREEZE_SECONDS: Final = 0.5
_SUM: Final = struct.Struct("<I")


@dataclass(slots=True)
class Soaked:
    """What happened in one run."""

    transfers: int = 0
    arrived: int = 0
    failed: int = 0
    kills: int = 0
    freezes: int = 0


class _Trouble:
    """Kills or freezes the current victim every second, on its own thread."""

    def __init__(self, dice: random.Random, soaked: Soaked) -> None:
        self._dice = dice
        self._soaked = soaked
        self._lock = threading.Lock()
        self._victim: RemoteVictim | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trouble", daemon=True)
        self._thread.start()

    def aim_at(self, victim: RemoteVictim | None) -> None:
        with self._lock:
            self._victim = victim

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            with self._lock, suppress(CaseFailed, ProcessLookupError, ChildProcessError):
                if self._victim is None:
                    continue
                if self._dice.random() < 0.5:
                    self._soaked.kills += 1
                    self._victim.kill()
                    self._victim = None
                else:
                    self._soaked.freezes += 1
                    self._victim.freeze()
                    self._stop.wait(self._dice.random() * FREEZE_SECONDS)
                    self._victim.resume()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)


def soak(transport: str, transfers: int, seed: int = 1) -> Soaked:
    """Run it; ``CaseFailed`` says what went wrong."""
    dice, soaked = random.Random(seed), Soaked()
    with Stage(transport, Here()) as stage:
        a = stage.node("/suite/a")
        mine = a.allocate(SLOT_BYTES * SLOTS), a.allocate(SLOT_BYTES * SLOTS)
        a.fill(mine[0], 0, SLOT_BYTES * SLOTS, 11)
        trouble = _Trouble(dice, soaked)
        this_process = psutil.Process()
        before: tuple[int, int] | None = None
        try:
            while soaked.transfers < transfers:
                victim = stage.victim("/suite/b")
                try:
                    a_link, b_link = stage.join(a, victim)
                    ways = _ways(Pair(a, a_link, victim, b_link), mine)
                except (CaseFailed, TransportError):
                    _bury(victim)
                    continue
                if before is None:
                    before = this_process.num_fds(), this_process.num_threads()
                trouble.aim_at(victim)
                _use(ways, transfers, dice, soaked)
                trouble.aim_at(None)
                a.close_link(a_link)
                _bury(victim)
        finally:
            trouble.close()
        _nothing_left(this_process, before)
    return soaked


def _nothing_left(process: psutil.Process, before: tuple[int, int] | None) -> None:
    """No more may be left without a link than there was with one link up."""
    if before is not None:
        fds, threads = before
        wait_until(
            "descriptors and threads of all links are gone",
            lambda: process.num_fds() <= fds + 8 and process.num_threads() <= threads + 4,
        )


def _bury(victim: RemoteVictim) -> None:
    """Release its process and pipes."""
    with suppress(CaseFailed):
        victim.kill()
    victim.close()


def _ways(pair: Pair, mine: tuple[int, int]) -> tuple[Way, Way]:
    """There and back, over the same memory at this end for every incarnation of the other."""
    a, b = pair.a, pair.b
    theirs = b.allocate(SLOT_BYTES * SLOTS), b.allocate(SLOT_BYTES * SLOTS)
    b.fill(theirs[0], 0, SLOT_BYTES * SLOTS, 12)
    there = Way(a, pair.a_link, mine[0], b, pair.b_link, theirs[1], b.grant(theirs[1], a.address()))
    back = Way(b, pair.b_link, theirs[0], a, pair.a_link, mine[1], a.grant(mine[1], b.address()))
    return there, back


def _use(ways: tuple[Way, Way], transfers: int, dice: random.Random, soaked: Soaked) -> None:
    """Batches of transfers until the peer is gone or enough were made."""
    while soaked.transfers < transfers:
        way = dice.choice(ways)
        try:
            if not _one_batch(way, dice, soaked):
                return
        except (LinkDownError, PeerHasEnded):
            return


def _arrivals(way: Way) -> list[Heard]:
    return [h for h in way.target.log.all(link=way.target_link) if h.kind == "arrived"]


def _one_batch(way: Way, dice: random.Random, soaked: Soaked) -> bool:
    """Fill the slots; returns whether the link is still up afterwards."""
    before = len(_arrivals(way))
    numbers = []
    for slot in range(SLOTS):
        nbytes = int(SLOT_BYTES ** dice.random()) - 1
        offset = dice.randrange(SLOT_BYTES * SLOTS - nbytes)
        told = _SUM.pack(way.source.digest(way.source_region, offset, nbytes))
        numbers.append(way.write(offset, nbytes, slot * SLOT_BYTES, told))
        soaked.transfers += 1
    deadline = time.monotonic() + SETTLE_SECONDS
    lost = _wait(way, before + len(numbers), deadline)
    arrived = _arrivals(way)[before:]
    for heard in arrived:
        if heard.note[24:] != _SUM.pack(heard.digest):
            raise CaseFailed(f"{heard.nbytes} bytes were reported as arrived, but they are not those that were sent")
    soaked.arrived += len(arrived)
    if lost and way.source.log.all("lost", way.source_link):
        settled = way.source.log.wait_settled(numbers, way.source_link)
        soaked.failed += sum(kind == "failed" for kind in settled.values())
    return not lost


def _wait(way: Way, arrivals: int, deadline: float) -> bool:
    """Wait until all have arrived (False), or either end has lost the link or its process (True)."""
    pause = threading.Event()
    while time.monotonic() < deadline:
        if len(_arrivals(way)) >= arrivals:
            return False
        if any(node.log.all("lost", link) for node, link in _ends(way)):
            return True
        pause.wait(0.002)
    raise CaseFailed(f"a batch was neither delivered nor lost within {SETTLE_SECONDS:g} s")


def _ends(way: Way) -> tuple[tuple[SuiteNode, int], ...]:
    return (way.source, way.source_link), (way.target, way.target_link)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance_hosts.soak", description=__doc__)
    parser.add_argument("transport", choices=known_transports())
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    try:
        soaked = soak(options.transport, options.transfers, options.seed)
    except (CaseFailed, TransportError) as error:
        sys.stdout.write(f"{options.transport}: FAILED: {error}\n")
        return 1
    sys.stdout.write(f"{options.transport}: ok in {time.monotonic() - began:.0f} s: {soaked}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
