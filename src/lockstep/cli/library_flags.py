"""The flags that tell a program of one's own, and ``lockstep ps``, their cluster: rows of the table of ``bench``.

``cluster_flags`` gives a program what ``lockstep.join`` takes and leaves it the rest of its command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.flags.build import RDMA_FLAGS, rdma_options
from lockstep.cli.flags.flag import Flag, Group, Kind, Rows, Value
from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.cli.flags.table import TABLE
from lockstep.errors import BadInput
from lockstep.training.library.settings import ON_NAN, ON_WORKER_LOSS, REDUCTIONS
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
    "on_stall",
    "rejoin_timeout",
    "grace",
    "bind",
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
        Kind.CHOICE,
        "mean",
        "what becomes of the workers' gradients: their mean, or their sum",
        choices=REDUCTIONS,
        upstream=False,
    ),
    _ROWS.works(
        "replicas_to_aggregate",
        Kind.WHOLE,
        None,
        "backup workers: a step is made of the first so many workers that finish it (default: all)",
        upstream=False,
    ),
    _ROWS.works(
        "on_worker_loss",
        Kind.CHOICE,
        "wait",
        "when a worker is lost: wait for it to be started again, or end (default: wait where it can come back)",
        choices=ON_WORKER_LOSS,
        upstream=False,
    ),
)

_OF_PROGRAMS = (
    _ROWS.works("servers", Kind.WHOLE, 1, "with a launcher: how many of its first ranks serve", upstream=False),
    _ROWS.works("bucket_mb", Kind.NUMBER, 4.0, "size of what travels at once, in MiB", upstream=False),
    _ROWS.works(
        "on_nan",
        Kind.CHOICE,
        "report",
        "a NaN or an infinity in a gradient: name the first and go on, leave the step out, or end the job",
        choices=ON_NAN,
        upstream=False,
    ),
)
"""What a server need not know."""

LIBRARY_TABLE: tuple[Flag, ...] = (*(flag for flag in TABLE if flag.name in _SHARED), *_OWN)

_JOIN_NAMES = {"cross_replica_sync": "synchronous"}
"""Where ``lockstep.join`` has a plainer word."""


def read_library_flags(argv: Sequence[str], table: Sequence[Flag] = LIBRARY_TABLE) -> CommandLine:
    """These flags and no others; BadInput with a sentence for each mistake."""
    line = read_command_line(argv, table)
    if line.mistakes:
        raise BadInput(line.mistakes)
    return line


def cluster_flags(argv: Sequence[str]) -> tuple[dict[str, Value | RdmaOptions], list[str]]:
    """Split a command line: keyword arguments for ``lockstep.join``, and the words that are the program's own.

    Raises BadInput where a flag of the cluster has a value that makes no sense.
    """
    table = (*LIBRARY_TABLE, *_OF_PROGRAMS)
    known = {flag.name for flag in table}
    switches = {flag.name for flag in table if flag.kind is Kind.SWITCH}
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
    line = read_library_flags(ours, table)
    values = {name: given.value for name, given in line.given.items()}
    arguments: dict[str, Value | RdmaOptions] = {
        _JOIN_NAMES.get(name, name): value for name, value in values.items() if name not in RDMA_FLAGS
    }
    if values.keys() & set(RDMA_FLAGS):
        arguments["rdma"] = rdma_options(values)
    return arguments, rest
