"""Kills tasks of a running job with SIGKILL, again and again, and compares its result, bit for bit.

``python bench/chaos.py --seeds 20 --protocol auto`` runs a small convolutional model (batch-norm and all) with two
servers and three workers once undisturbed, then once per seed with ten kills: a random task, 5 to 20 committed steps
after the last recovery. Monitors restart the killed tasks. The final parameters must be the same file.
It reports how long a recovery takes: from the kill to the next commit, and how much of that came after the killed task
had Python and torch running again. On a busy machine the job may finish before the last kills; that is said.

``--server_replicas=1`` gives each server's shard a second home, and no checkpoint is written on the way. A server that
is killed then costs no step: the next commit is its second home's, and the next task is killed only after the job has
said that its replica is whole again. Servers count what they make: no version may be made twice. With
``--kill=servers`` only servers are killed.

``--spares=N`` starts the cluster with one command, in which N spares wait for whatever is lost (docs/recovery.md), and
kills the next task only once a spare waits again. ``python bench/chaos.py --spares 1 --server_replicas 1 --seeds 20``
is everything together.

``--library --kill=servers --server_replicas=1`` does the same to a program of one's own (``chaos_program.py``): servers
are ``lockstep ps``, workers run below ``lockstep run``. It clips by norms, makes calls in every step and asks for the
optimizer's state; the model, the norms and the state must be the same.

``--also_monitors`` kills a server with its monitor and all that belongs to it, so nobody reports its end.
``--hosts=namespaces`` gives each task a host of its own (needs root): a server is lost by removing its interface and
killing what ran there, so its connections stay open. Both need ``--kill=servers --server_replicas=1``. The same
command is started again after the next commit, as when a host comes back.

``--device=gpu`` computes and updates on a GPU that all tasks share, deterministically; not with ``--library``.

Several of these may run side by side: each has a folder, ports and hosts of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_hosts import ChaosHosts, namespace_hosts
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import CHIEF, ClusterShape, Role, TaskId
from lockstep.runtime.host_network import why_not
from lockstep.runtime.monitor.spare import WAITING_NAME
from lockstep.runtime.processes import descendants
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_snapshot

ROOM = 20
"""Steps kept for each kill still to come: on a busy machine a job is many steps further when it is asked and killed."""
FIRST, LAST = 5, 20
"""How many committed steps after a recovery the next task is killed."""
ASK_SECONDS = 1.0
POLL_SECONDS = 0.05
RECOVERY_SECONDS = 120.0
RUN_SECONDS = 900.0
LATE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, and what is done to it."""

    shape: ClusterShape
    steps: int
    kills: int
    only_servers: bool
    replicas: bool
    spares: int = 0
    library: bool = False
    loses_monitors: bool = False
    """A server is lost with all its processes, and its command is started again later."""

    @property
    def result(self) -> str:
        """The file in which the chief leaves what must be the same."""
        return "final.txt" if self.library else "final.safetensors"

    def victims(self) -> tuple[TaskId, ...]:
        return self.shape.server_ids() if self.only_servers else self.shape.tasks()


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill: which task, and how long until the job went on; ``beyond``: after Python and torch were there again."""

    task: TaskId
    seconds: float
    beyond: float
    led: bool = False
    """It was the coordinator's."""
    whole: float = 0.0
    """How long until the job had a replica again."""

    @property
    def kind(self) -> str:
        if self.led:
            return "coordinator"
        return "chief" if self.task == CHIEF else "server" if self.task.role.value == "ps" else "worker"


@dataclass
class Cluster:
    """The tasks of one run, each with a monitor, as an outside user would start them."""

    train_dir: Path
    flags: Sequence[str]
    plan: Plan
    hosts: ChaosHosts = field(default_factory=ChaosHosts)
    addresses: dict[TaskId, str] = field(default_factory=dict)
    programs: dict[TaskId, subprocess.Popen[bytes]] = field(default_factory=dict)
    lost: set[TaskId] = field(default_factory=set)
    """Those that nobody has started again."""

    def start(self) -> None:
        shape = self.plan.shape
        self.addresses = self.hosts.addresses(shape.tasks())
        for task in shape.tasks():
            self.start_task(task)

    def start_task(self, task: TaskId) -> None:
        shape = self.plan.shape
        hosts = [",".join(self.addresses[t] for t in ids) for ids in (shape.server_ids(), shape.worker_ids())]
        lists = [f"--ps_hosts={hosts[0]}", f"--worker_hosts={hosts[1]}", f"--task_index={task.index}"]
        command = [*self.hosts.prefix(task), *self.command(task, lists)]
        with (self.train_dir / f"{task.short.replace(' ', '-')}.log").open("ab") as log:
            self.programs[task] = subprocess.Popen(command, stdout=log, stderr=log)

    def lose(self, task: TaskId) -> None:
        """SIGKILL to the task; or to all that runs on its host, whose network is gone before anybody can say so."""
        if not self.plan.loses_monitors:
            os.kill(self.pid(task), signal.SIGKILL)
            return
        self.lost.add(task)
        program = self.programs.pop(task)
        everything = [program.pid, *(one.pid for one in descendants(program.pid))]
        self.hosts.unplug(task)
        for pid in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.wait()

    def bring_back(self, task: TaskId) -> None:
        """What was lost without anybody who would start it again."""
        if task in self.lost:
            self.lost.remove(task)
            self.hosts.plug(task)
            self.start_task(task)

    def command(self, task: TaskId, lists: Sequence[str]) -> list[str]:
        lockstep = [sys.executable, "-m", "lockstep"]
        if not self.plan.library:
            role = f"--job_name={task.role.value}"
            return [*lockstep, "bench", role, *lists, *self.flags, f"--train_dir={self.train_dir}"]
        if task.role.value == "ps":
            restarts = [f"--restarts={self.plan.kills}"] if "--server_replicas=1" in self.flags else []
            return [*lockstep, "ps", *lists, *restarts, *self.flags]
        program = [sys.executable, str(Path(__file__).with_name("chaos_program.py")), str(self.plan.steps)]
        result = str(self.train_dir / self.plan.result)
        return [*lockstep, "run", "--", *program, result, "--job_name=worker", *lists, *self.flags]

    def machines(self, task: TaskId) -> dict[str, Any]:
        """What a task says of its machines; empty while it does not answer."""
        try:
            found = describe(self.addresses[task], ASK_SECONDS)
            if not found.task_address or found.exited:
                return {}
            fields: dict[str, Any] = json.loads(fetch_snapshot(found.task_address, "Task", ASK_SECONDS))
        except (Unreachable, ValueError):
            return {}
        return dict(fields["machines"])

    def lead(self) -> tuple[TaskId, dict[str, Any]] | None:
        """The server that coordinates the running job, and what it says; None while there is none."""
        for task in self.plan.shape.server_ids():
            said = {} if task in self.lost else self.machines(task)
            if said.get("coordinator", {}).get("phase") == "running":
                return task, said
        return None

    def committed(self) -> int:
        """The newest committed step, according to the coordinator; -9 while it does not answer."""
        found = self.lead()
        return -9 if found is None else int(found[1]["coordinator"]["committed"])

    def made_twice(self) -> int:
        """How many versions the servers that are there have made again."""
        return sum(int(self.machines(t).get("role", {}).get("made_twice", 0)) for t in self.plan.shape.server_ids())

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
        """The exit codes. A server that was killed shortly before the end and came back after it finds nobody: where
        the job has a train_dir, it waits for the others to start again, and its code does not matter."""
        deadline = time.monotonic() + RUN_SECONDS
        workers = [program for task, program in self.programs.items() if task.role is Role.WORKER]
        codes = [program.wait(max(1.0, deadline - time.monotonic())) for program in workers]
        for program in self.programs.values():
            if program not in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    codes.append(program.wait(LATE_SECONDS))
        return codes

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


class OneCommand(Cluster):
    """The same as one command, which keeps the spares."""

    def start(self) -> None:
        shape = self.plan.shape
        command = [sys.executable, "-m", "lockstep", "bench", f"--ps={shape.servers}", f"--workers={shape.workers}"]
        with self.log.open("wb") as log:
            self.programs[CHIEF] = subprocess.Popen(
                [*command, *self.flags, f"--spares={self.plan.spares}", f"--train_dir={self.train_dir}"],
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: bool(self._found()), self, RECOVERY_SECONDS, "address of a task")
        self.addresses = self._found()

    @property
    def log(self) -> Path:
        return self.train_dir / "cluster.log"

    def _found(self) -> dict[TaskId, str]:
        """Every task, as any of their monitors knows them."""
        where = re.search(r"lockstep why (\S+:\d+)", self.log.read_text())
        if where is None:
            return {}
        try:
            known = json.loads(fetch_snapshot(where[1], "Monitor", ASK_SECONDS))["cluster"]
        except (Unreachable, ValueError):
            return {}
        return {TaskId.parse(name): str(address) for name, address in dict(known).items()}

    def has_spares(self) -> bool:
        waiting = [one for one in descendants(self.programs[CHIEF].pid) if one.name == WAITING_NAME]
        return len(waiting) >= self.plan.spares


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
        time.sleep(POLL_SECONDS)


def kill_and_wait(cluster: Cluster, victim: TaskId) -> Recovery:
    """SIGKILL, then wait until the job commits a step that the victim took part in again."""
    before = cluster.pid(victim)
    found = cluster.lead()
    at_kill = cluster.committed()
    try:
        os.kill(before, signal.SIGKILL)
    except ProcessLookupError:
        raise JobDone from None
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
    led = found is not None and found[0] == victim
    return Recovery(victim, seconds, min(seconds, cluster.torch_is_there_since(victim)), led)


def kill_and_see_taken_over(cluster: Cluster, victim: TaskId) -> Recovery:
    """SIGKILL to a server with a second home: wait for a commit of the next view, then until all is whole again."""
    answers: list[tuple[TaskId, dict[str, Any]]] = []

    def asked() -> bool:
        found = cluster.lead()
        answers.extend([] if found is None else [found])
        return found is not None

    wait_until(asked, cluster, RECOVERY_SECONDS, "answer of the coordinator")
    (lead, said), before = answers[-1], cluster.pid(victim)
    view, at_kill = int(said["role"]["view"]), int(said["coordinator"]["committed"])
    killed_at = time.monotonic()
    cluster.lose(victim)

    def says(what: Callable[[dict[str, Any]], bool]) -> Callable[[], bool]:
        def of_the_next_view() -> bool:
            now = cluster.lead()
            return now is not None and int(now[1]["role"]["view"]) > view and what(now[1])

        return of_the_next_view

    commits = says(lambda machines: int(machines["coordinator"]["committed"]) > at_kill)
    wait_until(commits, cluster, RECOVERY_SECONDS, f"step after the loss of {victim}")
    seconds = time.monotonic() - killed_at
    cluster.bring_back(victim)
    wait_until(lambda: cluster.pid(victim) not in (0, before), cluster, RECOVERY_SECONDS, f"restart of {victim}")
    whole = says(lambda machines: bool(machines["role"]["whole"]) and str(victim) in machines["coordinator"]["joined"])
    wait_until(whole, cluster, RECOVERY_SECONDS, "replica that is whole")
    return Recovery(victim, seconds, seconds, lead == victim, time.monotonic() - killed_at)


def kill_again_and_again(cluster: Cluster, dice: random.Random, recoveries: list[Recovery]) -> None:
    plan = cluster.plan
    for number in range(plan.kills):
        wait_until(lambda: cluster.committed() >= 0, cluster, RECOVERY_SECONDS, "first steps")
        target = min(cluster.committed() + dice.randint(FIRST, LAST), plan.steps - ROOM * (plan.kills - number))
        wait_until(lambda t=target: cluster.committed() >= t, cluster, RECOVERY_SECONDS, f"step {target}")  # type: ignore[misc]
        if isinstance(cluster, OneCommand):
            wait_until(cluster.has_spares, cluster, RECOVERY_SECONDS, "spare that waits")
        victim = dice.choice(plan.victims())
        taken_over = plan.replicas and victim.role.value == "ps"
        recoveries.append((kill_and_see_taken_over if taken_over else kill_and_wait)(cluster, victim))
        if cluster.made_twice():
            raise RuntimeError(f"a version was made twice; see the logs in {cluster.train_dir}")


def one_run(folder: Path, flags: Sequence[str], plan: Plan, seed: int | None, hosts: ChaosHosts) -> list[Recovery]:
    """Train to the end in ``folder``; with a seed, kill on the way."""
    folder.mkdir(parents=True)
    of_one = plan.spares and seed is not None
    cluster = OneCommand(folder, flags, plan) if of_one else Cluster(folder, flags, plan, hosts)
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


def summary(run: str, recoveries: Sequence[Recovery], *, same: bool) -> str:
    """One line per run."""
    bits = "the same bits" if same else "OTHER BITS"
    if not recoveries:
        return f"{run}: {bits}, 0 kills"
    seconds = [one.seconds for one in recoveries]
    names = ", ".join(f"{one.task.short}{' (led)' if one.led else ''} {one.seconds:.2f}" for one in recoveries)
    times = f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
    return f"{run}: {bits}, {len(recoveries)} kills, {times} ({names})"


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
    seconds = [one.seconds for one in recoveries]
    if seconds:
        print(f"{'all':12} {len(seconds):5} {statistics.median(seconds):9.2f} {max(seconds):8.2f}")
    whole = [one.whole for one in recoveries if one.whole]
    if whole:
        print(f"whole again after {statistics.median(whole):.2f} s (median), {max(whole):.2f} s (worst)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--protocol", default="auto")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--folder", default="")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="400; with spares 1200, because kills wait for them")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--kill", choices=("all", "servers"), default="all")
    parser.add_argument("--server_replicas", type=int, choices=(0, 1), default=0)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--library", action="store_true")
    parser.add_argument("--also_monitors", action="store_true")
    parser.add_argument("--hosts", choices=("here", "namespaces"), default="here")
    asked = parser.parse_args()
    loses_monitors = asked.also_monitors or asked.hosts == "namespaces"
    if loses_monitors and (asked.kill != "servers" or not asked.server_replicas or asked.spares):
        parser.error("--also_monitors and --hosts=namespaces need --kill=servers --server_replicas=1, without --spares")
    if asked.hosts == "namespaces" and (why := why_not()):
        parser.error(f"--hosts=namespaces: {why}")
    if asked.library and (asked.kill != "servers" or not asked.server_replicas):
        parser.error("--library needs --kill=servers --server_replicas=1")
    if asked.library and (asked.spares or asked.device == "gpu"):
        parser.error("--library takes neither --spares, which are of one command, nor --device=gpu")
    shape = ClusterShape(2, asked.workers)
    steps = asked.steps or (1200 if asked.spares else 400)
    only_servers = asked.kill == "servers"
    replicated = bool(asked.server_replicas)
    plan = Plan(shape, steps, asked.kills, only_servers, replicated, asked.spares, asked.library, loses_monitors)
    flags = [
        f"--model={asked.model}",
        "--data_name=cifar10",
        f"--device={asked.device}",
        *(("--deterministic",) if asked.device == "gpu" else ()),
        "--batch_size=2",
        "--num_threads=1",
        f"--local_parameter_device={asked.device}",
        f"--num_batches={plan.steps}",
        "--num_warmup_batches=0",
        "--optimizer=momentum",
        "--bucket_mb=0.25",
        *(() if plan.replicas else ("--save_model_steps=10",)),
        f"--restarts={plan.kills}",
        f"--server_protocol={asked.protocol}",
    ]
    replicas = ["--server_replicas=1"] if plan.replicas else []
    if plan.library:
        flags, replicas = [f"--server_protocol={asked.protocol}"], ["--server_replicas=1"]
    everything: list[Recovery] = []
    too_few = 0
    with contextlib.ExitStack() as stack:
        folder = Path(asked.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        hosts = stack.enter_context(namespace_hosts(shape.tasks())) if asked.hosts == "namespaces" else ChaosHosts()
        one_run(folder / "undisturbed", flags, plan, None, hosts)
        wanted = (folder / "undisturbed" / plan.result).read_bytes()
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            recoveries = one_run(folder / f"seed-{seed}", [*flags, *replicas], plan, seed, hosts)
            same = (folder / f"seed-{seed}" / plan.result).read_bytes() == wanted
            print(summary(f"seed {seed} over {asked.protocol}", recoveries, same=same))
            sys.stdout.flush()
            everything += recoveries
            if not same:
                return 1
            if len(recoveries) < plan.kills:
                print(f"the job was too fast for the last {plan.kills - len(recoveries)} kills")
            too_few += 2 * len(recoveries) < plan.kills
    report(everything)
    return 1 if too_few else 0


if __name__ == "__main__":
    sys.exit(main())
