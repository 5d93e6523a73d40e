"""``lockstep bench --ps=N --workers=M`` below a launcher: each process that it started becomes one of those tasks.

The same command line runs a whole cluster on this machine if nobody has started more than one process. Torch-free: the
ranks meet at rank 0's address, because torchrun's store would need torch in every monitor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from lockstep.cli.flags import task_arguments
from lockstep.cli.flags.build import build_config
from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.cli.flags.table import TABLE
from lockstep.errors import BadInput
from lockstep.library.launcher import LAUNCHED_VARIABLE, Launch, launched_by
from lockstep.library.meeting import gather
from lockstep.protocol.core.ids import Role
from lockstep.protocol.core.timing import STOP_SECONDS
from lockstep.runtime.monitor.door import RunLink, run_link
from lockstep.runtime.startup.cluster import ClusterSpec, cluster_problems
from lockstep.security.chosen import settle
from lockstep.terminal import say
from lockstep.transports.control.ports import ReservedPort


def placed(argv: Sequence[str], environ: Mapping[str, str], held: contextlib.ExitStack) -> list[str]:
    """The command line of the task that this process is among those of a launcher; ``argv`` if there is no launcher.

    Blocks until all have met. ``held`` keeps the port that the others know until this process listens there.
    """
    line = read_command_line(argv, TABLE)
    if line.mistakes or line.help_on is not None or LAUNCHED_VARIABLE in environ:
        return list(argv)
    config = build_config(line)
    if config.task is not None:
        return list(argv)
    cluster = config.cluster or ClusterSpec()
    if problems := cluster_problems(cluster):
        raise BadInput(problems)
    launch = launched_by(environ, port=None if cluster.second_ports is None else cluster.second_ports.agreed)
    if launch is None or launch.world == 1:
        return list(argv)
    if config.local is None:
        if launch.rank == 0:
            say(
                f"{launch.launcher} started {launch.world} processes, and each trains alone; --ps=1 "
                f"--workers={launch.world - 1} makes them one job"
            )
        return list(argv)
    servers, workers = config.local.servers, config.local.workers
    if servers + workers != launch.world:
        raise BadInput(
            f"{launch.launcher} started {launch.world} processes, and --ps={servers} --workers={workers} are "
            f"{servers + workers} tasks; start as many processes as there are tasks."
        )
    settle(say)
    link = run_link(environ)
    try:
        met = _met(cluster, launch, link, servers, held)
        return _arguments(argv, line, met, launch, link, environ)
    finally:
        if link is not None:
            link.leave()


def _met(
    cluster: ClusterSpec, launch: Launch, link: RunLink | None, servers: int, held: contextlib.ExitStack
) -> ClusterSpec:
    if link is None:
        port = held.enter_context(ReservedPort("", cluster.second_ports)).port
    else:
        port = link.reserve(cluster.second_ports)
        link.be_patient(cluster.grace + 2 * STOP_SECONDS)  # the task's own monitor kills it before
    return gather(cluster, dataclasses.replace(launch, store=None), link, servers, port)


def _arguments(
    argv: Sequence[str],
    line: CommandLine,
    met: ClusterSpec,
    launch: Launch,
    link: RunLink | None,
    environ: Mapping[str, str],
) -> list[str]:
    assert met.task is not None
    words = task_arguments(argv, met.task, met.ps_hosts, met.worker_hosts)
    if link is not None and "restarts" not in line.given:
        words.append(f"--restarts={link.restarts}")
    cores = environ.get("SLURM_CPUS_PER_TASK", "") if launch.launcher == "srun" else ""
    if cores.isdecimal() and met.task.role is Role.WORKER and "num_threads" not in line.given:
        words.append(f"--num_threads={cores}")
    if launch.again and line.value("from_scratch"):
        words = [word for word in words if word.partition("=")[0] != "--from_scratch"]
        if launch.rank == 0:
            say(f"--from_scratch has no effect: {launch.launcher} has started this job before, and it resumes")
    return words
