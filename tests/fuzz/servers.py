"""Attacks two servers that are not part of a running job: rank 0 of a rendezvous, and ``lockstep net --serve``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from fuzz.live import CONNECT_SECONDS, END_SECONDS, Door, Say, attackers, within
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Program
from lockstep.runtime.startup.rendezvous import RendezvousSpec, meet
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.transports.control.addresses import Address

_LOOPBACK: Final = "127.0.0.1"


def attack_rendezvous(seed: int, seconds: float, say: Say) -> list[str]:
    """Strangers come to rank 0 for a while, then the other rank does."""
    key = chosen_key()
    place = Address(_LOOPBACK, free_port())
    spec = RendezvousSpec(
        rank=0, world=2, address=place, timeout=seconds + END_SECONDS, version="fuzz",
        key=None if key is None else key.sub(Purpose.RENDEZVOUS),
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        host: Future[tuple[str, ...]] = pool.submit(meet, spec, 1001, lambda _text: None)
        made = _visited(Door((place.host, place.port)), seed, seconds, host.done)
        say(f"{'rendezvous':<32} {made:>9} connections")
        if host.done():
            return [f"rank 0 ended: {host.exception()!r}"]
        try:
            guest = meet(replace(spec, rank=1), 1002, lambda _text: None)
            same = guest == host.result(END_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            return [f"the ranks did not meet: {error!r}"]
    return [] if made and same else ["nothing was attacked, or the ranks found different lists"]


def attack_net(seed: int, seconds: float, say: Say) -> list[str]:
    """Strangers come to a server of measurements for a while, then a real one does."""
    where = f"{_LOOPBACK}:{free_port()}"
    with Program([*LOCKSTEP, "net", f"--serve={where}"]) as server:
        port = int(where.rpartition(":")[2])
        made = _visited(Door((_LOOPBACK, port)), seed, seconds, lambda: not server.running())
        say(f"{'net --serve':<32} {made:>9} connections")
        if not made or not server.running():
            return [f"the server ended, or never listened: {server.stderr()[-1500:]}"]
        measure = [*LOCKSTEP, "net", where, "--max_size=4096", "--rounds=1", "--only=TCP", "--json=-"]
        done = subprocess.run(measure, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    return [] if done.returncode == 0 else [f"a measurement afterwards failed: {done.stderr[-1500:]}"]


def _visited(door: Door, seed: int, seconds: float, ended: Callable[[], bool]) -> int:
    """How many connections were made; it listens by the end of the first seconds."""

    def answers() -> bool:
        try:
            door.connect().close()
        except OSError:
            return False
        return True

    if not within(END_SECONDS, lambda: answers() or ended()):
        return 0
    begun = attackers([door], seed, seconds)
    for attacker in begun:
        attacker.join(seconds + 2 * CONNECT_SECONDS)
    return sum(attacker.made for attacker in begun)
