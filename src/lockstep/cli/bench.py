"""``lockstep bench``: the process that a person starts. It checks the command line and this machine without torch.

With ``--ps`` and ``--workers`` it starts a whole cluster on this machine; with ``--job_name`` it is the monitor of one
task, which runs as its child (``bench_task.py``); with neither it trains in this process alone.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from lockstep.benchmark.settings.config import BenchConfig, LocalCluster, recovery_rules, settings
from lockstep.cli.flags import check_machine, parse_bench, task_arguments, task_meant
from lockstep.errors import EXIT_BAD_INPUT, BadInput
from lockstep.library.launcher import LAUNCHED_VARIABLE
from lockstep.protocol.coordinator.recovery import LossPolicy
from lockstep.protocol.core.ids import CHIEF, Role, TaskId, server
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.own_name import with_own_address
from lockstep.security.chosen import settle
from lockstep.terminal import drop_what_cannot_be_written, say
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.runtime.monitor.spares import SparePlan

TASK_FLAG = "--lockstep_task="
"""Internal: this process is the task itself, and reports to its monitor on this descriptor."""


CORES_OF_GPU_WORKER = 4
MOST_SERVER_THREADS = 8
"""More threads do not make the update of one bucket faster."""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    drop_what_cannot_be_written()
    return start(argv, (sys.executable, "-m", "lockstep"))


def start(argv: Sequence[str], program: Sequence[str]) -> int:
    """Run the command; child processes are started as ``program bench FLAGS``."""
    if argv and argv[0].startswith(TASK_FLAG):
        return _run_task(argv[1:], int(argv[0].removeprefix(TASK_FLAG)))
    from lockstep.cli.launched import placed

    with ExitStack() as until_it_listens:
        return _start(placed(argv, os.environ, until_it_listens), program)


def _start(argv: Sequence[str], program: Sequence[str]) -> int:
    # Imported here, because the task itself needs none of them.
    from lockstep.cli.start_checks import start_notices

    try:
        config = _checked(argv)
    except BadInput as bad:
        return _refuse(argv, bad)
    for notice in (*config.output.notices, *start_notices(config, os.environ)):
        say(notice)
    if config.local is not None or config.task is not None:
        settle(say)
    if config.local is not None:
        return _run_local_cluster(config, argv, program)
    if config.task is not None:
        return _run_monitor(config, argv, program)
    from lockstep.cli.bench_task import run_alone

    return run_alone(config)


def _checked(argv: Sequence[str]) -> BenchConfig:
    """The run that was asked for, which this machine can do."""
    from lockstep.cli.start_checks import gpudirect_limits, limits_of_machine

    config = _where_it_listens(parse_bench(argv, os.environ), say)
    limits = [one.sentence for one in limits_of_machine(config, os.environ) if one.keeps_from_working]
    check_machine(config, [*limits, *gpudirect_limits(config)])
    _refuse_a_past_that_cannot_be_used(config)
    return config


def _refuse(argv: Sequence[str], bad: BadInput) -> int:
    """One task of a cluster answers for a moment, so that the others learn why it does not come."""
    cluster = task_meant(argv, os.environ)
    if cluster is None:
        raise bad
    cluster = with_own_address(cluster, os.environ)
    from lockstep.runtime.monitor.refusal import answer_for_refused

    for sentence in bad.sentences:
        say(sentence)
    answer_for_refused(cluster, __version__, " ".join(bad.sentences))
    return EXIT_BAD_INPUT


def _run_task(words: Sequence[str], report_fd: int) -> int:
    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.task.failures import told_to_monitor

    reporter = TaskReporter(report_fd)
    with told_to_monitor(reporter):
        from lockstep.cli.bench_task import run_task
        from lockstep.runtime.monitor.task_process import read_marks

        flags, former = read_marks(words)
        config = _where_it_listens(parse_bench(flags, os.environ), lambda _line: None)
        return run_task(config, reporter, former)


def _where_it_listens(config: BenchConfig, say: Callable[[str], None]) -> BenchConfig:
    if config.cluster is None:
        return config
    return dataclasses.replace(config, cluster=with_own_address(config.cluster, os.environ, say))


def _refuse_a_past_that_cannot_be_used(config: BenchConfig) -> None:
    """Refuse it before anything starts; the coordinator's server would find out only later."""
    coordinates = config.local is not None or (config.cluster is not None and config.task == server(0))
    output = config.output
    if output.train_dir is None or output.from_scratch or not coordinates or not recovery_rules(config).saves:
        return
    from lockstep.runtime.checkpoint.resuming import refuse_early

    refuse_early(output.train_dir, settings(config))


def _run_monitor(config: BenchConfig, argv: Sequence[str], program: Sequence[str]) -> int:
    from lockstep.cli.forming import addresses_of, forming_line
    from lockstep.runtime.monitor.monitor import MonitorSpec, run_monitor
    from lockstep.runtime.monitor.task_process import MARKS, REPORT_FD
    from lockstep.runtime.startup.start_facts import start_facts

    assert config.cluster is not None
    assert config.task is not None
    listen = config.cluster.listen_address()
    command = (*program, "bench", f"{TASK_FLAG}{REPORT_FD}", *MARKS, *argv)
    spec = MonitorSpec(
        task=config.task,
        host=listen.host,
        port=listen.port,
        command=command,
        version=__version__,
        start=start_facts(config.cluster, __version__, settings(config)),
        cluster=config.cluster.all_addresses(),
        restarts=config.cluster.restarts,
        # In a cluster of one command they belong to the launcher, which lends them.
        spares=None if LAUNCHED_VARIABLE in os.environ else _spares(config.cluster, argv, program),
        takes_signals=True,
        grace=config.cluster.grace,
        metrics=config.cluster.metrics,
    )
    if config.task != CHIEF or LAUNCHED_VARIABLE in os.environ:
        return run_monitor(spec)
    # On one task only: where people look, next to the chief's lines.
    with forming_line(addresses_of(config.cluster), config.cluster.startup_timeout):
        return run_monitor(spec)


def _run_local_cluster(config: BenchConfig, argv: Sequence[str], program: Sequence[str]) -> int:
    from lockstep.cli.forming import forming_line
    from lockstep.runtime.local_cluster.cluster import LocalClusterSpec, run_local_cluster
    from lockstep.runtime.local_cluster.gpu_sharing import shared_gpu
    from lockstep.runtime.startup.preflight import count_gpus
    from lockstep.transports.control.ports import ReservedPort

    assert config.local is not None
    local = config.local
    cluster = config.cluster or ClusterSpec()
    on_gpus = config.devices.device != "cpu" and count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) > 0

    def command(task: TaskId, ps_hosts: Sequence[str], worker_hosts: Sequence[str]) -> list[str]:
        arguments = task_arguments(argv, task, ps_hosts, worker_hosts)
        if config.devices.num_threads is None:
            arguments.append(f"--num_threads={_threads(task, local, on_gpus)}")
        if meeting is not None:
            arguments.append(f"--collective_port={meeting.port}")
        return [*program, "bench", *arguments]

    os.environ[LAUNCHED_VARIABLE] = "1"
    spares = _spares(cluster, argv, program)
    meets = config.exchange.is_collective and config.exchange.collective_port is None and cluster.ports is None
    spec = LocalClusterSpec(
        servers=local.servers,
        workers=local.workers,
        command=command,
        show_all=config.output.verbose,
        grace=cluster.grace,
        forming=functools.partial(forming_line, patience=cluster.startup_timeout),
        may_lose_a_server=bool(cluster.server_replicas),
        may_lose_workers=cluster.on_worker_loss == LossPolicy.SHRINK.value,
        ports=cluster.second_ports,
        spares=spares,
        around=functools.partial(shared_gpu, os.environ, say) if on_gpus and shares_gpus(config) else nullcontext,
    )
    # Where worker 0 will listen for the others: kept from the tasks, whose ports the kernel chooses meanwhile.
    with ReservedPort() if meets else nullcontext() as meeting:
        return run_local_cluster(spec)


def _spares(cluster: ClusterSpec, argv: Sequence[str], program: Sequence[str]) -> SparePlan | None:
    from lockstep.cli.preloading import FOR_BENCH
    from lockstep.runtime.monitor.python_command import python_command
    from lockstep.runtime.monitor.spares import SparePlan

    found = python_command([*program, "bench"]) if cluster.spares else None
    if found is None:
        return None
    return SparePlan(count=cluster.spares, program=found, loads=FOR_BENCH, words=tuple(argv))


def shares_gpus(config: BenchConfig) -> bool:
    """Whether servers compute on the workers' GPUs, and nothing is lost if all tasks end with one of them.

    Not if a lost task is to come back: a task that dies can take down the others that share its MPS.
    """
    cluster = config.cluster or ClusterSpec()
    goes_on = cluster.restarts or cluster.on_worker_loss == LossPolicy.SHRINK.value or recovery_rules(config).saves
    on_server = config.exchange.local_parameter_device == "gpu" and not config.exchange.is_collective
    return config.devices.mps and on_server and not goes_on


def _threads(task: TaskId, local: LocalCluster, on_gpus: bool) -> int:
    """The workers of one machine share its cores; a server runs in the gaps that they leave.

    Workers on GPUs leave nearly all of them free: each needs a few to start its kernels and copies.
    """
    cores = len(os.sched_getaffinity(0))
    if task.role is Role.WORKER:
        return max(1, cores // local.workers)
    if not on_gpus:
        return 1
    return max(1, min(MOST_SERVER_THREADS, (cores - CORES_OF_GPU_WORKER * local.workers) // max(1, local.servers)))
