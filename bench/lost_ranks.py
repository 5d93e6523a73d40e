"""Kills ranks of a job without servers below ``lockstep run``, and compares its result, bit for bit.

``python bench/lost_ranks.py --ranks 2 3 --seeds 20`` trains a small model (batch-norm, dropout, a scheduler, AdamW)
once undisturbed, then once per seed: a random rank is killed with SIGKILL at a random moment, twice per run. ``lockstep
run`` starts it again, and it comes back into its step; the other processes stay, and nothing is written to disk. All
ranks must end with the digests of the undisturbed run, optimizer and kept state included. Reports the seconds from a
kill to the next step that all ranks begin, and how many of them the killed rank spent before ``lockstep.join()``
returned nothing but Python and torch. ``--beside 4``: so many runs side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.transports.control.monitor_client import Unreachable, describe

STEPS = 40
KILLS = 2
STEP_SECONDS = 0.05
"""What a step takes besides its arithmetic, so that there are moments to kill at."""
RUN_SECONDS = 300.0


# -- the program --


def program(words: list[str]) -> None:
    import torch
    from torch import nn

    import lockstep

    sys.stdout.write(f"imported {time.time():.3f}\n")
    ours, _ = lockstep.cluster_flags(words)
    torch.set_num_threads(1)
    with lockstep.join(**ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        job.wrap(model, optimizer)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10, 25], gamma=0.5)
        job.keep(scheduler=scheduler)
        for step in job.steps(STEPS, seed=7):
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
            optimizer.zero_grad()
            (model(torch.randn(8, 16)) ** 2).mean().backward()
            time.sleep(STEP_SECONDS)
            optimizer.step()
            scheduler.step()
        values = [*model.state_dict().values()]
        for state in optimizer.state_dict()["state"].values():
            values += state.values()
        bits = b"".join(value.detach().numpy().tobytes() for value in values) + repr(scheduler.state_dict()).encode()
        sys.stdout.write(f"digest {hashlib.sha256(bits).hexdigest()[:16]}\n")
        sys.stdout.flush()


# -- the job around it --


@dataclass(frozen=True)
class Kill:
    """``after_import``: of the seconds, those after the next life had imported torch."""

    victim: int
    seconds: float
    after_import: float


@dataclass
class Ranks:
    """The ranks of one run, each below ``lockstep run``."""

    folder: Path
    addresses: list[str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        for index in range(len(self.addresses)):
            place = (f"--worker_hosts={','.join(self.addresses)}", "--job_name=worker", f"--task_index={index}")
            command = [sys.executable, "-m", "lockstep", "run", "--restarts=9", "--", sys.executable, __file__]
            with self._log(index).open("wb") as log:
                started = subprocess.Popen([*command, "--as_program", *place], stdout=log, stderr=log)
            self.started.append(started)

    def _log(self, index: int) -> Path:
        return self.folder / f"rank-{index}.log"

    def said(self, index: int) -> str:
        return self._log(index).read_text(errors="replace")

    def steps_begun(self) -> int:
        """How many steps all ranks have begun so far, those made again included."""
        return sum(len(re.findall(r"^step \d+$", self.said(index), re.M)) for index in range(len(self.addresses)))

    def imported_at(self, index: int) -> float:
        """When the newest life of a rank had imported torch, in seconds since 1970."""
        return float(re.findall(r"^imported ([\d.]+)$", self.said(index), re.M)[-1])

    def over(self) -> bool:
        return any(one.poll() is not None for one in self.started)

    def kill(self, index: int) -> bool:
        with contextlib.suppress(Unreachable, ProcessLookupError):
            found = describe(self.addresses[index], 2.0)
            if found.pid:
                os.kill(found.pid, signal.SIGKILL)
                return True
        return False

    def digests(self) -> list[str]:
        for one in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(RUN_SECONDS)
            if one.returncode != 0:
                raise SystemExit(f"a rank ended with {one.returncode} (None: not at all): see {self.folder}")
        return [re.findall(r"^digest (\w+)$", self.said(index), re.M)[-1] for index in range(len(self.addresses))]

    def close(self) -> None:
        for one in self.started:
            if one.poll() is None:
                one.kill()
                one.wait()


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as held:
        bound = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in bound]


def wait_for_steps(ranks: Ranks, count: int) -> bool:
    """False if the job is over before."""
    deadline = time.monotonic() + RUN_SECONDS
    while ranks.steps_begun() < count:
        if ranks.over():
            return False
        if time.monotonic() > deadline:
            raise SystemExit(f"no step for {RUN_SECONDS:g} s: see {ranks.folder}")
        time.sleep(0.005)
    return True


def disturb(ranks: Ranks, rng: random.Random) -> Iterator[Kill]:
    """Kill ranks one after another; yields each with the seconds until a step begins that all make."""
    for _ in range(KILLS):
        soon = ranks.steps_begun() + rng.randint(1, 10 * len(ranks.addresses))
        if not wait_for_steps(ranks, soon):
            return
        time.sleep(rng.uniform(0.0, 2 * STEP_SECONDS))
        victim = rng.randrange(len(ranks.addresses))
        if not ranks.kill(victim):
            return
        began, known = time.time(), ranks.steps_begun()
        # The others may begin one more step each, and the killed one begins its step again: then all go on.
        if not wait_for_steps(ranks, known + len(ranks.addresses) + 1):
            return
        now = time.time()
        yield Kill(victim, now - began, now - max(began, ranks.imported_at(victim)))


def run(count: int, rng: random.Random | None) -> tuple[list[str], list[Kill]]:
    ranks = Ranks(Path(tempfile.mkdtemp(prefix="lost-ranks-")), free_addresses(count))
    ranks.start()
    try:
        kills = [] if rng is None else list(disturb(ranks, rng))
        digests = ranks.digests()
    finally:
        ranks.close()
    shutil.rmtree(ranks.folder)  # after a failure it stays
    return digests, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--beside", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    for count in options.ranks:
        kill_ranks(count, range(options.first, options.first + options.seeds), options.beside)


def kill_ranks(count: int, seeds: range, beside: int) -> None:
    """One run per seed; exits with 1 if any of them ends with other bits."""
    expected, _ = run(count, None)
    found: list[Kill] = []
    wrong = 0
    with ThreadPoolExecutor(beside) as pool:
        runs = pool.map(lambda seed: (seed, *run(count, random.Random(seed))), seeds)
        for seed, digests, kills in runs:
            found += kills
            told = ", ".join(f"rank {kill.victim} {kill.seconds:.1f} s" for kill in kills)
            same = "the same bits" if digests == expected else f"OTHER BITS: {digests}, not {expected}"
            wrong += digests != expected
            say(f"{count} ranks, seed {seed}: {told or 'no kill'}: {same}")
    for name, seconds in (
        ("from a kill to the next step", [kill.seconds for kill in found]),
        ("of these after Python and torch", [kill.after_import for kill in found]),
    ):
        if seconds:
            say(
                f"{count} ranks, {len(seconds)} kills, {name}: median {statistics.median(seconds):.2f} s, at worst "
                f"{max(seconds):.2f} s"
            )
    if wrong:
        raise SystemExit(1)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as_program"]:
        program(sys.argv[2:])
    else:
        main()
