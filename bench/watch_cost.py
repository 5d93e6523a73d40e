"""What ``lockstep watch`` costs a training step of a few milliseconds.

    python bench/watch_cost.py [--system=ddp] [--ranks=2] [--steps=4000] [--turns=4] [--pause=0.004]

Two ways, as whole runs one after the other show nothing but the noise of the machine:

- The same DDP job bare and watched, both at the same time, so that whatever else the machine does meets both.
  ``--pause`` makes a step of about 5 ms, in which a processor mostly waits, as for a GPU. Every 50 steps all ranks say
  how long a step took and how much of a processor it used; blocks of the same moment are compared, and the median of
  their ratios is given with the interval that holds it with 95 %. In every second turn the other job starts first. What
  the watcher itself uses is counted apart, as a share of one processor.
- What is done in a rank, each part alone, in the processor's time: the hook at each step, the thread four times a
  second, a look at the recorder's calls.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from lockstep.drill.systems import SYSTEMS, torchrun
from lockstep.watch import injected
from lockstep.watch.entry import RING_CALLS
from lockstep.watch.straggling import LONGEST_PAUSE_SECONDS

WARM_UP: Final = 300
BLOCK: Final = 50
STEP_SECONDS: Final = 0.005
TIMES: Final = 2000
LOOKS: Final = 40
ASKS: Final = """
import sys
from lockstep.watch.ranks import RankProcess
from pathlib import Path
rank = RankProcess(0, 0, Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    assert len(rank.dump()) > 10000
"""


@dataclass(slots=True)
class Job:
    """One of the two, and what its ranks have said."""

    command: list[str]
    folder: Path
    ended: dict[int, float] = field(default_factory=dict)
    """When rank 0 had made so many steps, in seconds since 1970."""
    took: dict[int, float] = field(default_factory=dict)
    used: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Of all ranks together."""

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            process = subprocess.Popen(self.command, stdout=out, stderr=err, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def read(self, code: int) -> None:
        if code != 0:
            said = (self.folder / "err").read_text(errors="replace")[-6000:]
            raise SystemExit(f"exit code {code} of {' '.join(self.command)}\n{said}")
        for line in (self.folder / "out").read_text().splitlines():
            if line.startswith("took "):
                rank, step, ended, took, used = line.split()[1:]
                self.used[int(step)] += float(used)
                if rank == "0":
                    self.ended[int(step)], self.took[int(step)] = float(ended), float(took)


# -- whole jobs, side by side --


@dataclass(slots=True)
class Compared:
    """Blocks of the same moment."""

    bare: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)

    def add(self, bare: float, watched: float) -> None:
        self.bare.append(bare)
        self.watched.append(watched)

    def line(self, name: str) -> str:
        if not self.bare:
            return f"{name}: the two jobs did not run at the same time"
        ratios = sorted(one / other - 1 for one, other in zip(self.watched, self.bare, strict=True))
        low, high = interval(ratios)
        bare, watched = (statistics.median(one) * 1e3 for one in (self.bare, self.watched))
        found = f"{statistics.median(ratios):+.2%} (95 %: {low:+.2%} to {high:+.2%})"
        return f"{name}: {bare:.3f} ms bare, {watched:.3f} watched; ratio in {len(ratios)} blocks {found}"


def same_moments(bare: Job, watched: Job) -> Iterator[tuple[int, int]]:
    """Blocks of both that ended at about the same time; none from when one of them ran alone."""
    for step, ended in watched.ended.items():
        nearest = min(bare.ended, key=lambda other: abs(bare.ended[other] - ended), default=None)
        if nearest is not None and abs(bare.ended[nearest] - ended) < BLOCK * watched.took[step] / 2:
            yield nearest, step


def interval(found: Sequence[float]) -> tuple[float, float]:
    """Of sorted values: between which two the median lies with 95 %, whatever their distribution."""
    half = 0.98 * math.sqrt(len(found))
    low, high = int(len(found) / 2 - half), math.ceil(len(found) / 2 + half)
    return found[max(0, low)], found[min(len(found) - 1, high)]


def side_by_side(jobs: Mapping[str, Job], first: str) -> float:
    """Run both to their ends; returns which share of a processor the watcher has used."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(jobs[name].running()) for name in sorted(jobs, key=lambda n: n != first)}
        watcher = psutil.Process(running["watched"].pid)
        began, before = time.monotonic(), 0.0
        share = 0.0
        while any(process.poll() is None for process in running.values()):
            time.sleep(0.2)
            with_times = _processor_seconds(watcher)
            if not before and (jobs["watched"].folder / "out").stat().st_size:
                began, before = time.monotonic(), with_times
            elif before and with_times:
                share = (with_times - before) / (time.monotonic() - began)
        for name, process in running.items():
            jobs[name].read(process.returncode)
    return share


def _processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def compare(command: list[str], turns: int) -> None:
    took, used, shares = Compared(), Compared(), []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="watch-cost-") as place:
            jobs = {
                name: Job([*prefix, *command], Path(place, name))
                for name, prefix in (("bare", []), ("watched", [sys.executable, "-m", "lockstep", "watch", "--"]))
            }
            for job in jobs.values():
                job.folder.mkdir()
            shares.append(side_by_side(jobs, ("bare", "watched")[turn % 2]))
            bare, watched = jobs["bare"], jobs["watched"]
            for one, other in same_moments(bare, watched):
                took.add(bare.took[one], watched.took[other])
                used.add(bare.used[one], watched.used[other])
        print(f"turn {turn + 1} of {turns}", flush=True)
    print(took.line("a step by the clock"))
    print(used.line("of processors, all ranks together"))
    print(f"the watcher itself: {statistics.median(shares):.2%} of one processor")


# -- the parts, alone --


def best(act: Callable[[], object], times: int) -> float:
    """Seconds of the processor, of one: the best of several goes."""

    def go() -> float:
        began = time.process_time()
        for _ in range(times):
            act()
        return (time.process_time() - began) / times

    return min(go() for _ in range(5))


def parts() -> None:
    os.environ.update({injected.RING_VARIABLE: str(RING_CALLS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1"})
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.optim import optimizer as torch_optimizer

    with tempfile.TemporaryDirectory(prefix="watch-cost-") as place:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        one: Any = injected._Rank(place, 0, 1)
        for _ in range(2 * RING_CALLS):
            dist.all_reduce(torch.ones(4))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        (hook,) = torch_optimizer._global_optimizer_post_hooks.values()
        a_step = best(lambda: hook(optimizer, (), {}), TIMES)
        one.named = True  # names are looked for once
        a_beat = best(one.beat, TIMES)
        a_look = min(_of_looks(one.path) for _ in range(3))
        dist.destroy_process_group()
        one.leave()
    each = {
        "hook": a_step / STEP_SECONDS,
        "thread": a_beat / injected.BEAT_SECONDS,
        "looks": a_look / LONGEST_PAUSE_SECONDS,
    }
    print(f"the hook: {a_step * 1e6:.2f} us a step; the thread: {a_beat * 1e6:.1f} us, four times a second")
    print(f"a look at {RING_CALLS} calls: {a_look * 1e3:.2f} ms, every {LONGEST_PAUSE_SECONDS:.0f} s in the long run")
    print(f"of a step of {STEP_SECONDS * 1e3:.0f} ms: {sum(each.values()):.3%}, of which")
    print("  " + ", ".join(f"{name} {share:.3%}" for name, share in each.items()))


def _of_looks(path: str) -> float:
    """What this process uses for one, while another asks."""
    began = time.process_time()
    subprocess.run([sys.executable, "-c", ASKS, path, str(LOOKS)], check=True)
    return (time.process_time() - began) / LOOKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, default="ddp")
    parser.add_argument("--ranks", type=int, default=2, help="of each of the two jobs")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=4, help="0: the parts alone")
    parser.add_argument("--pause", type=float, default=0.004)
    args = parser.parse_args()
    flags = (f"--kind={args.system}", f"--steps={args.steps}", f"--at={WARM_UP}", f"--pause={args.pause}")
    if args.turns:
        compare(torchrun(*flags, f"--times={BLOCK}", ranks=args.ranks), args.turns)
    parts()


if __name__ == "__main__":
    main()
