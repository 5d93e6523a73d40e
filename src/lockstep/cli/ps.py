"""``lockstep ps``: one parameter server for any job of the library. It needs nothing of the program that trains.

What a person starts is the monitor; the server itself runs below it, as in ``lockstep bench``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from lockstep.cli.flags.build import TOKEN_VARIABLE, rdma_options
from lockstep.cli.flags.parsing import CommandLine
from lockstep.cli.library_flags import LIBRARY_TABLE, read_library_flags
from lockstep.errors import EXIT_FAILED, BadInput, HelpAsked
from lockstep.protocol.ids import Role, TaskId
from lockstep.runtime.cluster import ClusterSpec, cluster_problems
from lockstep.runtime.preflight import task_problems
from lockstep.training.library.settings import Exchange, Keeping, exchange_problems, keeping_problems
from lockstep.version import __version__

TASK_FLAG = "--lockstep_task="
"""Internal: this process is the server itself, and this is the descriptor on which it reports to its monitor."""

_HELP = """\
lockstep ps: a parameter server for programs that use the library.

  lockstep ps --ps_hosts=HOST:PORT,... --worker_hosts=HOST:PORT,... --task_index=N

Give it the lists that the program gives to lockstep.join(), and the same choices:

{flags}

It ends when the job has ended: 0 done, 1 failed, 2 bad input (nothing started),
130, 129 or 143 ended by a signal (docs/when-a-job-stands-still.md).
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(help_text())
    if argv and argv[0].startswith(TASK_FLAG):
        return _run_server(argv[1:], int(argv[0].removeprefix(TASK_FLAG)), os.environ)
    cluster, _, _ = _parse(argv, os.environ)
    problems = task_problems(cluster)
    if problems:
        raise BadInput(problems)
    from lockstep.runtime.monitor.run import MonitorSpec, run_monitor
    from lockstep.runtime.monitor.task_process import REPORT_FD

    assert cluster.task is not None
    listen = cluster.listen_address()
    command = (sys.executable, "-m", "lockstep", "ps", f"{TASK_FLAG}{REPORT_FD}", *argv)
    spec = MonitorSpec(
        task=cluster.task,
        host=listen.host,
        port=listen.port,
        command=command,
        version=__version__,
        takes_signals=True,
        grace=cluster.grace,
    )
    return run_monitor(spec)


def help_text() -> str:
    """Every flag with what it means."""
    rows = [f"  {flag.usage():<44} {flag.help}" for flag in LIBRARY_TABLE if flag.name != "job_name"]
    return _HELP.format(flags="\n".join(rows))


def _parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ClusterSpec, Exchange, Keeping]:
    line = read_library_flags(argv)
    if line.value("job_name") not in ("", "ps"):
        raise BadInput("'lockstep ps' is always a server; leave out --job_name, or start the program itself as worker.")
    values = {flag.name: line.value(flag.name) for flag in LIBRARY_TABLE}
    count = values["replicas_to_aggregate"]
    exchange = Exchange(
        synchronous=bool(values["cross_replica_sync"]),
        reduction=str(values["reduction"]),
        replicas_to_aggregate=count if isinstance(count, int) else None,
    )
    ps_hosts, worker_hosts, index = values["ps_hosts"], values["worker_hosts"], values["task_index"]
    assert isinstance(ps_hosts, tuple)
    assert isinstance(worker_hosts, tuple)
    assert isinstance(index, int)
    cluster = ClusterSpec(
        ps_hosts=ps_hosts,
        worker_hosts=worker_hosts,
        task=TaskId(Role.SERVER, index),
        protocol=str(values["server_protocol"]),
        bind=None if values["bind"] is None else str(values["bind"]),
        startup_timeout=_number(line, "startup_timeout"),
        stall_after=_number(line, "stall_after"),
        rejoin_timeout=_number(line, "rejoin_timeout"),
        grace=_number(line, "grace"),
        on_stall=str(values["on_stall"]),
        token=str(values["job_token"] or environ.get(TOKEN_VARIABLE, "")),
        rdma=rdma_options(values),
    )
    keeping = _keeping(line)
    problems = cluster_problems(cluster) + list(exchange_problems(exchange, len(worker_hosts)))
    problems += keeping_problems(keeping, exchange, len(worker_hosts), launched=False)
    if problems:
        raise BadInput(problems)
    return cluster, exchange, keeping


def _number(line: CommandLine, name: str) -> float:
    value = line.value(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _keeping(line: CommandLine) -> Keeping:
    return Keeping(
        train_dir=str(line.value("train_dir") or ""),
        save_model_secs=_number(line, "save_model_secs"),
        save_model_steps=int(_number(line, "save_model_steps")),
        max_ckpts_to_keep=int(_number(line, "max_ckpts_to_keep")),
        from_scratch=bool(line.value("from_scratch")),
        on_worker_loss=str(line.value("on_worker_loss")) if "on_worker_loss" in line.given else "",
    )


def _run_server(argv: Sequence[str], report_fd: int, environ: Mapping[str, str]) -> int:
    from lockstep.entry import node_config, say, serve
    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.signals import TaskSignals

    cluster, exchange, keeping = _parse(argv, environ)
    assert cluster.task is not None
    signals = TaskSignals(cluster.task, say, cluster.grace)
    signals.install()
    outcome = serve(node_config(cluster, exchange, keeping), TaskReporter(report_fd), signals)
    if not outcome.ok and outcome.departure is None:
        say(outcome.sentence())
    return EXIT_FAILED if outcome.ok and outcome.unsaved else outcome.exit_code(EXIT_FAILED)
