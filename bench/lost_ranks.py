"""Kills ranks of a job without servers, and compares its result, bit for bit.

``python bench/lost_ranks.py --ranks 2 3 --seeds 20`` trains a small model (batch-norm, dropout, a scheduler, AdamW)
once undisturbed, then once per seed: a random rank is killed with SIGKILL at a random moment, twice per run. All ranks
must end with the digests of the undisturbed run, optimizer and kept state included. ``--under`` says what starts the
ranks, and what must happen:

- ``run``: one ``lockstep run`` per rank, with a list of addresses. The rank comes back into its step; the other
  processes stay, and nothing is written to disk.
- ``torchrun``: the same below ``torchrun --no-python ... lockstep run -- python``.
- ``bare``: ``torchrun --max-restarts=2`` alone, which ends every rank when one dies, and starts all again: the job
  resumes from its newest checkpoint, a few steps before the kill.

With ``--backend gloo`` torch.distributed carries the gradients: all go back to the newest checkpoint then, below
``lockstep run`` too.

Reports the seconds from a kill until every rank has begun a step that none had begun before, and how many of them came
after the killed rank had loaded Python and torch again. ``--beside 4``: so many runs side by side. Several of these
commands may run at a time (``--first`` is the first seed): each run has a folder of its own, and ports that it holds
until they are used.
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.runtime.processes import descendants, send_signal
from lockstep.transports.control.ports import ReservedPort

STEPS = 40
KILLS = 2
APART = 10
"""At most so many steps after the start, or after a recovery, the next rank is killed."""
STEP_SECONDS = 0.05
"""What a step takes besides its arithmetic, so that there are moments to kill at."""
SAVE_STEPS = 5
RUN_SECONDS = 300.0
UNDER = ("run", "torchrun", "bare")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1")
"""It finds a free port itself."""
BELOW_RUN = (sys.executable, "-m", "lockstep", "run", "--restarts=9", "--")
WHAT_BARE_SAYS = "a launcher ends every rank when one dies"


# -- the program --


def program(folder: Path, words: list[str]) -> None:
    """One rank; what it does stands in a file of its own, which its next life adds to."""
    import torch
    from torch import nn

    import lockstep

    ours, _ = lockstep.cluster_flags(words)
    rank = int(os.environ.get("RANK", str(ours.get("task_index"))))
    with log_of(folder, rank).open("a", buffering=1) as log:
        log.write(f"imported {os.getpid()} {time.time():.3f}\n")
        torch.set_num_threads(1)
        with lockstep.join(**ours) as job:  # type: ignore[arg-type]  # flags are checked by their table
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 16))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            job.wrap(model, optimizer)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10, 25], gamma=0.5)
            job.keep(scheduler=scheduler)
            for step in job.steps(STEPS, seed=7):
                log.write(f"step {step}\n")
                optimizer.zero_grad()
                (model(torch.randn(8, 16)) ** 2).mean().backward()
                time.sleep(STEP_SECONDS)
                optimizer.step()
                scheduler.step()
            values = [*model.state_dict().values()]
            for state in optimizer.state_dict()["state"].values():
                values += state.values()
            bits = b"".join(value.detach().numpy().tobytes() for value in values)
            bits += repr(scheduler.state_dict()).encode()
            log.write(f"digest {hashlib.sha256(bits).hexdigest()[:16]}\n")


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


# -- the job around it --


@dataclass(frozen=True)
class Kill:
    """``after_import``: of the seconds, those after the killed rank's next life had imported torch."""

    victim: int
    seconds: float
    after_import: float


class RunError(Exception):
    """A run did not end as it should."""


@dataclass
class Ranks:
    """The ranks of one run, and what has started them."""

    folder: Path
    count: int
    under: str
    backend: str = "own"
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ports: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> None:
        itself: tuple[str, ...] = (
            sys.executable,
            __file__,
            "--as_program",
            str(self.folder),
            f"--backend={self.backend}",
        )
        several = (*TORCHRUN, f"--nproc-per-node={self.count}")
        if self.all_go_back:
            itself += (f"--train_dir={self.folder / 'checkpoints'}", f"--save_model_steps={SAVE_STEPS}")
        if self.under == "bare":
            self._launch("torchrun", (*several, f"--max-restarts={KILLS}", "--no-python", *itself))
        elif self.under == "torchrun":
            self._launch("torchrun", (*several, "--no-python", *BELOW_RUN, *itself))
        else:
            hosts = ",".join(self.ports.enter_context(ReservedPort()).address for _ in range(self.count))
            for index in range(self.count):
                place = (f"--worker_hosts={hosts}", "--job_name=worker", f"--task_index={index}")
                self._launch(f"run-{index}", (*BELOW_RUN, *itself, *place))

    @property
    def all_go_back(self) -> bool:
        """To the newest checkpoint, in processes that are all new."""
        return self.under == "bare" or self.backend != "own"

    def _launch(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started.append(subprocess.Popen(command, stdout=log, stderr=log))

    def said(self, index: int) -> str:
        path = log_of(self.folder, index)
        return path.read_text() if path.exists() else ""

    def begun(self) -> list[int]:
        """The highest step that each rank has begun; -1: none; STEPS: it has made them all."""
        return [self._begun(self.said(index)) for index in range(self.count)]

    @staticmethod
    def _begun(said: str) -> int:
        return STEPS if "\ndigest " in said else max(map(int, re.findall(r"^step (\d+)$", said, re.M)), default=-1)

    def life(self, index: int) -> tuple[int, float]:
        """Process of the newest life of a rank, and when it had imported torch, in seconds since 1970."""
        pid, moment = re.findall(r"^imported (\d+) ([\d.]+)$", self.said(index), re.M)[-1]
        return int(pid), float(moment)

    def over(self) -> bool:
        return any(one.poll() is not None for one in self.started)

    def lives(self) -> list[int]:
        return [self.said(index).count("imported ") for index in range(self.count)]

    def digests(self) -> list[str]:
        deadline = time.monotonic() + RUN_SECONDS
        for one in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, deadline - time.monotonic()))
            if one.returncode != 0:
                raise RunError(f"ended with {one.returncode} (None: not at all)")
        return [re.findall(r"^digest (\w+)$", self.said(index), re.M)[-1] for index in range(self.count)]

    def check_said(self) -> None:
        """What torchrun alone does to a job is printed when it starts, in every life of the chief."""
        if self.under == "bare" and WHAT_BARE_SAYS not in (self.folder / "torchrun.log").read_text():
            raise RunError(f"nobody said that {WHAT_BARE_SAYS!r}")

    def close(self) -> None:
        for one in self.started:
            if one.poll() is None:
                below = descendants(one.pid)
                one.kill()
                one.wait()
                for process in below:
                    send_signal(process.pid, signal.SIGKILL)
        self.ports.close()


def wait_for_step(ranks: Ranks, step: int) -> bool:
    """Until every rank has begun it; False if the job is over before."""
    deadline = time.monotonic() + RUN_SECONDS
    while min(ranks.begun()) < step:
        if ranks.over():
            return min(ranks.begun()) >= step
        if time.monotonic() > deadline:
            raise RunError(f"no step for {RUN_SECONDS:g} s")
        time.sleep(0.005)
    return True


def disturb(ranks: Ranks, rng: random.Random) -> Iterator[Kill]:
    """Kill ranks one after another; yields each with the seconds until all begin a step that is new to all."""
    for _ in range(KILLS):
        if not wait_for_step(ranks, min(ranks.begun()) + rng.randint(1, APART)):
            return
        time.sleep(rng.uniform(0.0, 2 * STEP_SECONDS))
        victim = rng.randrange(ranks.count)
        known, lives = max(ranks.begun()), ranks.lives()
        if known >= STEPS:
            return
        began = time.time()
        os.kill(ranks.life(victim)[0], signal.SIGKILL)
        if not wait_for_step(ranks, known + 1):
            raise RunError(f"rank {victim} was killed in step {known}, and the job ended")
        now = time.time()
        again = [after - before for before, after in zip(lives, ranks.lives(), strict=True)]
        if again != [int(ranks.all_go_back or index == victim) for index in range(ranks.count)]:
            raise RunError(f"rank {victim} was killed, and ranks were started again so often: {again}")
        yield Kill(victim, now - began, now - max(began, ranks.life(victim)[1]))


@dataclass(frozen=True)
class Result:
    digests: list[str]
    kills: list[Kill]
    problem: str = ""


def run(under: str, backend: str, count: int, rng: random.Random | None) -> Result:
    ranks = Ranks(Path(tempfile.mkdtemp(prefix="lost-ranks-")), count, under, backend)
    kills: list[Kill] = []
    try:
        ranks.start()
        if rng is not None:
            kills += disturb(ranks, rng)
        digests = ranks.digests()
        ranks.check_said()
    except RunError as error:
        return Result([], kills, f"{error}: see {ranks.folder}")
    finally:
        ranks.close()
    shutil.rmtree(ranks.folder)  # after a failure it stays
    return Result(digests, kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--under", nargs="+", choices=UNDER, default=list(UNDER))
    parser.add_argument("--backend", choices=("own", "gloo"), default="own", help="what carries the gradients")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--beside", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    wrong = [
        f"{under}, {count} ranks"
        for count in options.ranks
        for under in options.under
        if not kill_ranks(under, options.backend, count, seeds, options.beside)
    ]
    if wrong:
        say(f"not as it should be: {'; '.join(wrong)}")
        raise SystemExit(1)


def kill_ranks(under: str, backend: str, count: int, seeds: range, beside: int) -> bool:
    """One run per seed; whether all of them ended with the same bits."""
    expected = run(under, backend, count, None)
    if expected.problem:
        say(f"{under}, {count} ranks, undisturbed: {expected.problem}")
        return False
    found: list[Kill] = []
    same = 0
    with ThreadPoolExecutor(beside) as pool:
        runs = pool.map(lambda seed: (seed, run(under, backend, count, random.Random(seed))), seeds)
        for seed, result in runs:
            found += result.kills
            told = ", ".join(f"rank {kill.victim} {kill.seconds:.1f} s" for kill in result.kills)
            good = not result.problem and result.digests == expected.digests
            same += good
            bits = (
                "the same bits" if good else result.problem or f"OTHER BITS: {result.digests}, not {expected.digests}"
            )
            say(f"{under}, {count} ranks, seed {seed}: {told or 'no kill'}: {bits}")
    runs_told = f"{same} of {len(seeds)} runs with the same bits"
    say(f"{under}, {count} ranks: {len(found)} kills, {runs_told}; {told_times(found)}")
    return same == len(seeds)


def told_times(kills: list[Kill]) -> str:
    if not kills:
        return "no rank was killed in time"
    all_in, after = [kill.seconds for kill in kills], [kill.after_import for kill in kills]
    return (
        f"from a kill to the next step: median {statistics.median(all_in):.2f} s, worst {max(all_in):.2f} s; of these "
        f"after Python and torch: median {statistics.median(after):.2f} s, worst {max(after):.2f} s"
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as_program"]:
        program(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
