"""The flags of ``lockstep bench``: one table (``table/``), read by the parser, the help and the documentation.

``parse_bench`` looks at the command line and the environment that it is given. ``check_machine`` looks at this
machine, and is for the process that a person starts: its child, the task itself, would find its own port taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.benchmark.settings.config import BenchConfig, resolved
from lockstep.benchmark.settings.rules import problems
from lockstep.cli.flags.build import build_config
from lockstep.cli.flags.engine import add_tf_config
from lockstep.cli.flags.metrics_rows import METRICS_ROWS
from lockstep.cli.flags.parsing import check_against_table, read_command_line
from lockstep.cli.flags.table import EXCLUSIVE, TABLE
from lockstep.errors import BadInput, HelpAsked
from lockstep.protocol.core.ids import CHIEF, Role, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec, cluster_problems
from lockstep.runtime.startup.preflight import count_gpus, folder_problems, task_problems

__all__ = [
    "BadInput",
    "DoctorLine",
    "HelpAsked",
    "check_machine",
    "parse_bench",
    "parse_doctor",
    "task_arguments",
    "task_meant",
]

_OF_ONE_TASK = ("ps", "workers", "job_name", "task_index", "ps_hosts", "worker_hosts")
"""Flags whose value differs from task to task of a local cluster."""

_NOT_IN_ONE_PROCESS = {
    **{flag.name: "needs a monitor, which a run in one process does not have" for flag in METRICS_ROWS},
    "on_verdict": "would never be run, since a run in one process gives no verdicts",
    "verdict_webhook": "would never be called, since a run in one process gives no verdicts",
    "server_replicas": "needs two servers, and a run in one process has none",
}
"""Flags on which somebody would rely in vain, and why."""
_SMALLEST_CLUSTER = "--ps=1 --workers=1"
_CLUSTERS = {"server_replicas": "--ps=2 --workers=1"}
"""What they need instead, where that is more."""


def parse_bench(argv: Sequence[str], environ: Mapping[str, str]) -> BenchConfig:
    """The run that a command line asks for.

    Raises:
        BadInput: with one sentence per problem.
        HelpAsked: with the requested help.
    """
    line = read_command_line(argv, TABLE)
    if line.help_on is not None:
        from lockstep.cli.flags.help import help_text

        raise HelpAsked(help_text(line.help_on))
    if line.mistakes:
        raise BadInput(line.mistakes)
    add_tf_config(line, environ)
    config, unreadable = _with_data_set(build_config(line), named="data_name" in line.given)
    ruled_out = check_against_table(line, EXCLUSIVE)
    if config.cluster is None:
        ruled_out += [
            f"--{name} {why}; add {_CLUSTERS.get(name, _SMALLEST_CLUSTER)}."
            for name, why in _NOT_IN_ONE_PROCESS.items()
            if line.gives(name)
        ]
    broken = [problem.sentence for problem in problems(config, _gpus(config, environ))]
    if ruled_out or broken or unreadable:
        raise BadInput(list(dict.fromkeys(ruled_out + broken + unreadable)))
    return resolved(config)


def task_meant(argv: Sequence[str], environ: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster and the task that a refused command line names, if that much of it is right."""
    line = read_command_line(argv, TABLE)
    if line.help_on is not None:
        return None
    line.mistakes.clear()
    try:
        add_tf_config(line, environ)
        cluster = build_config(line).cluster
    except (BadInput, ValueError, KeyError, TypeError):
        return None  # it has a value that cannot be read, perhaps one of those
    return None if cluster is None or cluster.task is None or cluster_problems(cluster) else cluster


def _with_data_set(config: BenchConfig, named: bool) -> tuple[BenchConfig, list[str]]:
    """The run with the name of the data set found in its folder, and its problems; servers need not have the folder."""
    folder = config.data.folder
    if folder is None or (config.task is not None and config.task.role is Role.SERVER):
        return config, []
    try:
        from lockstep.benchmark.data.errors import BadData
        from lockstep.benchmark.data.open_dataset import recognised
    except ImportError as missing:
        need = f"--data_dir needs the package {missing.name!r}; install it with 'pip install lockstep-torch[data]'."
        return config, [need]
    try:
        found = recognised(folder, config.data_name if named else None)
    except BadData as error:
        return config, [str(error)]
    return dataclasses.replace(config, data_name=found), []


@dataclass(frozen=True, slots=True)
class DoctorLine:
    """The command line of a job as ``lockstep doctor`` reads it: its problems are findings like any other."""

    config: BenchConfig
    problems: tuple[str, ...]
    describes_job: bool
    """Whether it gives more than the addresses of the tasks."""
    data_dir: str | None


def parse_doctor(argv: Sequence[str], environ: Mapping[str, str]) -> DoctorLine:
    """The job that a command line describes, with or without --job_name.

    Raises:
        BadInput: if it cannot be read, or has no cluster in it.
    """
    line = read_command_line(argv, TABLE)
    if line.mistakes:
        raise BadInput(line.mistakes)
    told_by_flags = line.gives("job_name")
    if not line.gives("ps_hosts") and not line.gives("worker_hosts"):
        add_tf_config(line, environ)
    config = build_config(line)
    if config.cluster is None:
        raise BadInput(
            "the cluster is missing; give --ps_hosts=HOST:PORT,... and --worker_hosts=HOST:PORT,..., as for the job."
        )
    named = bool(line.value("job_name"))
    ruled_out = [] if not named and config.local is None else check_against_table(line, EXCLUSIVE)
    broken = [problem.sentence for problem in problems(config)]
    if not named and config.local is None:
        broken += [problem for problem in cluster_problems(config.cluster) if problem not in broken]
    more = set(line.given) - {*_OF_ONE_TASK, "bind", "startup_timeout", "key_file", "insecure"}
    data_dir = line.value("data_dir")
    return DoctorLine(
        config,
        tuple(dict.fromkeys(ruled_out + broken)),
        told_by_flags or bool(more),
        data_dir if isinstance(data_dir, str) else None,
    )


def _gpus(config: BenchConfig, environ: Mapping[str, str]) -> int | None:
    """How many GPUs there are; counted only if it matters, since that may take a second."""
    is_server = config.task is not None and config.task.role is Role.SERVER
    if config.devices.device != "gpu" or is_server:
        return None
    return count_gpus(environ.get("CUDA_VISIBLE_DEVICES"))


def check_machine(config: BenchConfig, limits: Sequence[str] = ()) -> None:
    """Refuse what cannot work on this machine: its address, port, folder. BadInput names the problem and the remedy.

    ``limits``: sentences about limits that are too small, found elsewhere.
    """
    sentences: list[str] = []
    if config.cluster is not None:
        sentences += task_problems(config.cluster)
    # Only the chief writes files; the same command line may run on machines that do not have its folder.
    if config.output.train_dir is not None and config.task in (None, CHIEF):
        sentences += folder_problems("train_dir", config.output.train_dir)
    if config.output.timing_dir is not None:
        sentences += folder_problems("timing_dir", config.output.timing_dir)
    sentences += list(limits)
    if sentences:
        raise BadInput(sentences)


def task_arguments(
    argv: Sequence[str], task: TaskId, ps_hosts: Sequence[str], worker_hosts: Sequence[str]
) -> list[str]:
    """The command line of one task of a local cluster that ``argv`` (which must be valid) asks for.

    Flags without effect are left out, so that their notices appear once and not for every task.
    """
    line = read_command_line(argv, TABLE)
    kept = [
        given.argument() for name, given in line.given.items() if name not in _OF_ONE_TASK and line.has_effect(given)
    ]
    return [
        *kept,
        f"--job_name={task.role.value}",
        f"--task_index={task.index}",
        f"--ps_hosts={','.join(ps_hosts)}",
        f"--worker_hosts={','.join(worker_hosts)}",
    ]
