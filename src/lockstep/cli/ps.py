"""``lockstep ps``: one parameter server for any job of the library. It needs nothing from the script that trains.

The process that a person starts is the monitor; the server runs as its child, as in ``lockstep bench``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from lockstep.cli.library_flags import LIBRARY_TABLE, RESTARTS, join_arguments, read_library_flags
from lockstep.errors import EXIT_FAILED, BadInput, HelpAsked
from lockstep.library.engine_cluster import as_tf_config_says
from lockstep.library.join import JoinArguments, refuse_bad_cluster
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.own_name import with_own_address
from lockstep.runtime.startup.preflight import task_problems
from lockstep.runtime.startup.tf_config import VARIABLE as TF_CONFIG
from lockstep.security.chosen import settle
from lockstep.terminal import drop_what_cannot_be_written, say
from lockstep.version import __version__

TASK_FLAG = "--lockstep_task="
"""Internal: this process is the server itself, and reports to its monitor on this descriptor."""

_TABLE = (*LIBRARY_TABLE, RESTARTS)
_HELP = """\
lockstep ps: a parameter server for scripts that use the library.

  lockstep ps --ps_hosts=HOST:PORT,... --worker_hosts=HOST:PORT,... --task_index=N

Give it the same lists and choices that your script gives to lockstep.join(). The
lists and the index may be in the variable TF_CONFIG instead (docs/kubernetes.md).

{flags}

It ends when the job has ended: 0 done, 1 failed, 2 bad input (nothing started),
130, 129 or 143 ended by a signal (docs/when-a-job-hangs.md).
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(help_text())
    drop_what_cannot_be_written()
    if argv and argv[0].startswith(TASK_FLAG):
        return _run_server(argv[1:], int(argv[0].removeprefix(TASK_FLAG)))
    cluster, _ = _parse(argv)
    cluster = with_own_address(cluster, os.environ, say)
    problems = task_problems(cluster)
    if problems:
        raise BadInput(problems)
    settle(say)
    from lockstep.runtime.monitor.monitor import MonitorSpec, run_monitor
    from lockstep.runtime.monitor.task_process import MARKS, REPORT_FD

    assert cluster.task is not None
    listen = cluster.listen_address()
    command = (sys.executable, "-m", "lockstep", "ps", f"{TASK_FLAG}{REPORT_FD}", *MARKS, *argv)
    spec = MonitorSpec(
        task=cluster.task,
        host=listen.host,
        port=listen.port,
        command=command,
        version=__version__,
        cluster=cluster.all_addresses(),
        restarts=cluster.restarts,
        takes_signals=True,
        grace=cluster.grace,
        metrics=cluster.metrics,
    )
    return run_monitor(spec)


def help_text() -> str:
    """Every flag with its meaning."""
    rows = [f"  {flag.usage():<44} {flag.help}" for flag in _TABLE if flag.name != "job_name"]
    return _HELP.format(flags="\n".join(rows))


def _parse(argv: Sequence[str]) -> tuple[ClusterSpec, JoinArguments]:
    line = read_library_flags(argv, _TABLE)
    if line.value("job_name") not in ("", Role.SERVER):
        raise BadInput("'lockstep ps' is always a server; leave out --job_name, or start your script as the worker.")
    asked = join_arguments(line)
    restarts = asked.pop("restarts", 0)
    assert isinstance(restarts, int)
    given = JoinArguments(**asked)  # type: ignore[arg-type]
    arguments = given if line.given.keys() & {"job_name", "task_index"} else as_tf_config_says(given, os.environ)
    if arguments.job_name == Role.WORKER:
        raise BadInput(
            f"{TF_CONFIG} makes this process worker {arguments.task_index}, but 'lockstep ps' is always a server; "
            "start your program there."
        )
    arguments = dataclasses.replace(arguments, job_name=Role.SERVER.value)
    spec = dataclasses.replace(arguments.spec(), restarts=restarts)
    cluster = spec.for_task(TaskId(Role.SERVER, arguments.task_index))
    refuse_bad_cluster(cluster, arguments)
    if restarts and not arguments.server_replicas:
        raise BadInput(
            "--restarts is for servers that the job can do without for a while; add --server_replicas=1 to all tasks, "
            "or leave it out: the loss of this server ends the job."
        )
    return cluster, arguments


def _run_server(words: Sequence[str], report_fd: int) -> int:
    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.task.failures import told_to_monitor

    reporter = TaskReporter(report_fd)
    with told_to_monitor(reporter):
        from lockstep.library.node_config import node_config
        from lockstep.library.serving import refuse_missing_gpu, serve
        from lockstep.library.settings import Life
        from lockstep.runtime.monitor.task_process import read_marks
        from lockstep.runtime.task.signals import TaskSignals

        flags, former = read_marks(words)
        cluster, arguments = _parse(flags)
        cluster = with_own_address(cluster, os.environ)
        assert cluster.task is not None
        refuse_missing_gpu(arguments.serving)
        signals = TaskSignals(cluster.task, say, cluster.grace)
        signals.install()
        life, device = Life(later=former.exists, former_job=former.job), arguments.device
        config = node_config(cluster, arguments.exchange, arguments.keeping, life=life, server_device=device)
        outcome = serve(config, arguments.serving, reporter, signals)
    return EXIT_FAILED if outcome.ok and outcome.unsaved else outcome.exit_code(EXIT_FAILED)
