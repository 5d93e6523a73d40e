"""The flags that describe the cluster to your script and to ``lockstep ps``: rows of the table of ``bench``.

``cluster_flags`` turns them into arguments for ``lockstep.join`` and leaves your script the rest of its command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.flags.build import RDMA_FLAGS, rdma_options
from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows, Value
from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.cli.flags.table import TABLE
from lockstep.errors import BadInput
from lockstep.library.serving import SERVER_DEVICES
from lockstep.library.settings import BACKENDS, ON_NAN, ON_WORKER_LOSS, REDUCTIONS, WIRE_DTYPES
from lockstep.protocol.core.endings import ON_NAN_PARAMETERS
from lockstep.transports.verbs.options import RdmaOptions

_ROWS = Rows(Group.EXCHANGE)
_SHARED = (
    "ps_hosts",
    "worker_hosts",
    "job_name",
    "task_index",
    "server_protocol",
    "cross_replica_sync",
    "startup_timeout",
    "stall_after",
    "user_code_timeout",
    "on_stall",
    "on_verdict",
    "verdict_webhook",
    "metrics_port",
    "metrics_file",
    "rejoin_timeout",
    "server_replicas",
    "grace",
    "bind",
    "ports",
    "require_private",
    "key_file",
    "insecure",
    "job_token",
    "train_dir",
    "save_model_secs",
    "save_model_steps",
    "max_ckpts_to_keep",
    "from_scratch",
    *RDMA_FLAGS,
)
_OWN = (
    _ROWS.works(
        "reduction",
        FlagKind.CHOICE,
        "mean",
        "how the workers' gradients are combined: their mean, or their sum",
        choices=REDUCTIONS,
        upstream=False,
    ),
    _ROWS.works(
        "replicas_to_aggregate",
        FlagKind.WHOLE,
        None,
        "backup workers: a step consists of the first N workers that finish it (default: all)",
        upstream=False,
    ),
    _ROWS.works(
        "wire_dtype",
        FlagKind.CHOICE,
        "float32",
        "the type in which gradients are sent; 16 bits halve their bytes and lose precision",
        choices=WIRE_DTYPES,
        upstream=False,
    ),
    _ROWS.works(
        "device",
        FlagKind.CHOICE,
        "cpu",
        "where a server keeps and updates its parameters: on all cores that are its share, or on a GPU of its host",
        choices=SERVER_DEVICES,
        upstream=False,
    ),
    _ROWS.works(
        "on_worker_loss",
        FlagKind.CHOICE,
        "wait",
        "when a worker is lost: wait until it is started again, or end the job (default: wait if it can rejoin)",
        choices=ON_WORKER_LOSS,
        upstream=False,
    ),
)

PROGRAM_FLAGS = (
    _ROWS.works(
        "servers",
        FlagKind.WHOLE,
        None,
        "with a launcher: how many of the first ranks serve (default: none, every rank trains)",
        upstream=False,
    ),
    _ROWS.works(
        "backend",
        FlagKind.CHOICE,
        None,
        "without servers, what carries the gradients (default: own between CPUs, nccl or gloo where there are GPUs)",
        choices=BACKENDS,
        upstream=False,
    ),
    _ROWS.works(
        "bucket_mb",
        FlagKind.NUMBER,
        None,
        "bucket size in MiB: how much is sent at once (default: 4 to 8, up to 64 for large models within one host)",
        upstream=False,
    ),
    _ROWS.works(
        "on_nan",
        FlagKind.CHOICE,
        "report",
        "on NaN or infinity in a gradient: report the first and continue, skip the step, or end the job",
        choices=ON_NAN,
        upstream=False,
    ),
    _ROWS.works(
        "on_nan_parameters",
        FlagKind.CHOICE,
        "stop",
        "when a parameter contains NaN or infinity: end the job, or report it and continue",
        choices=ON_NAN_PARAMETERS,
        upstream=False,
    ),
)
"""Flags that a server does not need."""

LIBRARY_TABLE: tuple[Flag, ...] = (*(flag for flag in TABLE if flag.name in _SHARED), *_OWN)

RESTARTS = next(flag for flag in TABLE if flag.name == "restarts")
"""For ``lockstep ps``, whose process a monitor starts; what starts your script starts it again."""

_JOIN_NAMES = {"cross_replica_sync": "synchronous"}
"""Arguments of ``lockstep.join`` that have a plainer name than the flag."""


def read_library_flags(argv: Sequence[str], table: Sequence[Flag] = LIBRARY_TABLE) -> CommandLine:
    """Read these flags and no others; BadInput has one sentence per mistake."""
    line = read_command_line(argv, table)
    if line.mistakes:
        raise BadInput(line.mistakes)
    return line


def join_arguments(line: CommandLine) -> dict[str, Value | RdmaOptions]:
    """What was given, as keyword arguments for ``lockstep.join``."""
    values = {name: given.value for name, given in line.given.items()}
    arguments: dict[str, Value | RdmaOptions] = {
        _JOIN_NAMES.get(name, name): value for name, value in values.items() if name not in RDMA_FLAGS
    }
    if values.keys() & set(RDMA_FLAGS):
        arguments["rdma"] = rdma_options(values)
    return arguments


def cluster_flags(argv: Sequence[str]) -> tuple[dict[str, Value | RdmaOptions], list[str]]:
    """Split a command line: keyword arguments for ``lockstep.join``, and the words that are meant for your script.

    Raises BadInput if a cluster flag has a bad value.
    """
    table = (*LIBRARY_TABLE, *PROGRAM_FLAGS)
    known = {flag.name for flag in table}
    switches = {flag.name for flag in table if flag.kind is FlagKind.SWITCH}
    ours: list[str] = []
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not known.intersection((name, name.removeprefix("no"))):
            rest.append(word)
            continue
        ours.append(word)
        if not equals and words and not words[0].startswith("--") and name not in switches:
            ours.append(words.pop(0))
    return join_arguments(read_library_flags(ours, table)), rest
