"""Kills tasks of a running job with SIGKILL, again and again, and compares its result, bit for bit.

``python bench/chaos.py --seeds 20 --protocol auto`` runs a small convolutional model (batch-norm and all) with two
servers and three workers once undisturbed, then once per seed with ten kills: a random task, 5 to 20 committed steps
after the last recovery. Monitors restart the killed tasks. The final parameters must be the same file.
It reports how long a recovery takes: from the kill to the next commit, and how much of that came after the killed task
had Python and torch running again. On a busy machine the job may finish before the last kills; that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import CHIEF, ClusterShape, TaskId, server
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_snapshot

SHAPE = ClusterShape(2, 3)
STEPS = 400
KILLS = 10
ROOM = 20
"""Steps kept for each kill still to come: on a busy machine a job is many steps further when it is asked and killed."""
FIRST, LAST = 5, 20
"""How many committed steps after a recovery the next task is killed."""
ASK_SECONDS = 1.0
RECOVERY_SECONDS = 120.0
RUN_SECONDS = 900.0
COORDINATOR = server(0)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill: which task, and how long until the job went on; ``beyond``: after Python and torch were there again."""

    task: TaskId
    seconds: float
    beyond: float

    @property
    def kind(self) -> str:
        if self.task == COORDINATOR:
            return "coordinator"
        return "chief" if self.task == CHIEF else "server" if self.task.role.value == "ps" else "worker"


@dataclass
class Cluster:
    """The tasks of one run, each with a monitor, as an outside user would start them."""

    train_dir: Path
    flags: Sequence[str]
    addresses: dict[TaskId, str] = field(default_factory=dict)
    programs: dict[TaskId, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        self.addresses = dict(zip(SHAPE.tasks(), free_addresses(len(SHAPE.tasks())), strict=True))
        hosts = [",".join(self.addresses[t] for t in ids) for ids in (SHAPE.server_ids(), SHAPE.worker_ids())]
        for task in SHAPE.tasks():
            command = [sys.executable, "-m", "lockstep", "bench", f"--job_name={task.role.value}"]
            command += [f"--task_index={task.index}", f"--ps_hosts={hosts[0]}", f"--worker_hosts={hosts[1]}"]
            log = (self.train_dir / f"{task.short.replace(' ', '-')}.log").open("wb")
            self.programs[task] = subprocess.Popen(
                [*command, *self.flags, f"--train_dir={self.train_dir}"], stdout=log, stderr=log
            )
            log.close()

    def committed(self) -> int:
        """The newest committed step, according to the coordinator; -9 while it does not answer."""
        try:
            found = describe(self.addresses[COORDINATOR], ASK_SECONDS)
            if not found.task_address or found.exited:
                return -9
            fields = json.loads(fetch_snapshot(found.task_address, "Task", ASK_SECONDS))
        except (Unreachable, ValueError):
            return -9
        coordinator = fields["machines"].get("coordinator")
        return int(coordinator["committed"]) if coordinator is not None and coordinator["phase"] == "running" else -9

    def pid(self, task: TaskId) -> int:
        try:
            return describe(self.addresses[task], ASK_SECONDS).pid
        except Unreachable:
            return 0

    def torch_is_there_since(self, task: TaskId) -> float:
        """How many seconds ago this incarnation of the task had imported torch; 0 if it has not."""
        try:
            phases = json.loads(fetch_snapshot(self.addresses[task], "Monitor", ASK_SECONDS))["phases"]
        except (Unreachable, ValueError):
            return 0.0
        after = 0.0
        for here, following in itertools.pairwise(phases):
            if here["phase"] == TaskPhase.STARTING.value:
                after = 0.0  # another life
            if here["phase"] == TaskPhase.IMPORTING_TORCH.value:
                after = float(following["began_seconds_ago"])
        return after

    def finish(self) -> list[int]:
        deadline = time.monotonic() + RUN_SECONDS
        return [program.wait(max(1.0, deadline - time.monotonic())) for program in self.programs.values()]

    def close(self) -> None:
        for program in self.programs.values():
            if program.poll() is None:
                program.terminate()
        for program in self.programs.values():
            try:
                program.wait(15)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def free_addresses(count: int) -> list[str]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    finally:
        for one in held:
            one.close()


class JobDone(Exception):  # noqa: N818 - reads as the fact it states
    """A task has finished its work: the job was further than it had said when it was last asked."""


def wait_until(condition: Callable[[], bool], cluster: Cluster, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        codes = [code for program in cluster.programs.values() if (code := program.poll()) is not None]
        if any(codes):
            raise RuntimeError(f"a task ended while waiting for {what}; see the logs in {cluster.train_dir}")
        if codes:
            raise JobDone
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {seconds:.0f} s; see the logs in {cluster.train_dir}")
        time.sleep(0.05)


def kill_and_wait(cluster: Cluster, victim: TaskId) -> Recovery:
    """SIGKILL, then wait until the job commits a step that the victim took part in again."""
    before = cluster.pid(victim)
    at_kill = cluster.committed()
    os.kill(before, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: cluster.pid(victim) not in (0, before), cluster, RECOVERY_SECONDS, f"restart of {victim}")
    at_kill = max(at_kill, cluster.committed())  # what its former life had delivered may have been committed meanwhile
    seen: list[int] = []

    def goes_on() -> bool:
        now = cluster.committed()
        if now >= -1:
            seen.append(now)
        if victim.role.value == "worker":
            return now > at_kill + 1 and cluster.torch_is_there_since(victim) > 0
        # The job is in another incarnation: its steps begin at a checkpoint, and two in a row show that it goes on.
        return len(seen) > 1 and seen[-1] > seen[0] and cluster.torch_is_there_since(victim) > 0

    wait_until(goes_on, cluster, RECOVERY_SECONDS, f"step after the loss of {victim}")
    seconds = time.monotonic() - killed_at
    return Recovery(victim, seconds, min(seconds, cluster.torch_is_there_since(victim)))


def kill_again_and_again(cluster: Cluster, dice: random.Random, recoveries: list[Recovery]) -> None:
    for number in range(KILLS):
        wait_until(lambda: cluster.committed() >= 0, cluster, RECOVERY_SECONDS, "first steps")
        target = min(cluster.committed() + dice.randint(FIRST, LAST), STEPS - ROOM * (KILLS - number))
        wait_until(lambda t=target: cluster.committed() >= t, cluster, RECOVERY_SECONDS, f"step {target}")  # type: ignore[misc]
        recoveries.append(kill_and_wait(cluster, dice.choice(SHAPE.tasks())))


def one_run(folder: Path, flags: Sequence[str], seed: int | None) -> list[Recovery]:
    """Train to the end in ``folder``; with a seed, kill on the way."""
    folder.mkdir(parents=True)
    cluster = Cluster(folder, flags)
    recoveries: list[Recovery] = []
    try:
        cluster.start()
        if seed is not None:
            with contextlib.suppress(JobDone):
                kill_again_and_again(cluster, random.Random(seed), recoveries)
        codes = cluster.finish()
    finally:
        cluster.close()
    if any(codes):
        raise RuntimeError(f"the run in {folder} ended with exit codes {codes}")
    return recoveries


def report(recoveries: Sequence[Recovery]) -> None:
    print(f"{'lost':12} {'kills':>5} {'median s':>9} {'worst s':>8} {'beyond torch, median s':>23} {'worst s':>8}")
    for kind in ("worker", "chief", "server", "coordinator"):
        rows = [one for one in recoveries if one.kind == kind]
        if not rows:
            continue
        seconds, beyond = [one.seconds for one in rows], [one.beyond for one in rows]
        print(
            f"{kind:12} {len(rows):5} {statistics.median(seconds):9.2f} {max(seconds):8.2f} "
            f"{statistics.median(beyond):23.2f} {max(beyond):8.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--protocol", default="auto")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--folder", default="")
    asked = parser.parse_args()
    flags = [
        f"--model={asked.model}",
        "--data_name=cifar10",
        "--device=cpu",
        "--batch_size=2",
        "--num_threads=1",
        f"--num_batches={STEPS}",
        "--num_warmup_batches=0",
        "--optimizer=momentum",
        "--bucket_mb=0.25",
        "--save_model_steps=10",
        f"--restarts={KILLS}",
        f"--server_protocol={asked.protocol}",
    ]
    everything: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        folder = Path(asked.folder or made)
        one_run(folder / "undisturbed", flags, None)
        wanted = (folder / "undisturbed" / "final.safetensors").read_bytes()
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            recoveries = one_run(folder / f"seed-{seed}", flags, seed)
            same = (folder / f"seed-{seed}" / "final.safetensors").read_bytes() == wanted
            names = ", ".join(one.task.short for one in recoveries)
            print(f"seed {seed} over {asked.protocol}: {'the same bits' if same else 'OTHER BITS'} after {names}")
            sys.stdout.flush()
            everything += recoveries
            if not same:
                return 1
            if len(recoveries) < KILLS:
                print(f"the job was too fast for the last {KILLS - len(recoveries)} kills")
            if 2 * len(recoveries) < KILLS:
                return 1
    report(everything)
    return 0


if __name__ == "__main__":
    sys.exit(main())
