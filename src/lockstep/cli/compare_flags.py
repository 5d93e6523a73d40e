"""The flags of ``lockstep compare``: those of ``bench`` that define the training, and a few about the comparison."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.benchmark.compare import contestants
from lockstep.benchmark.compare.contestants import Comparison, all_contestants
from lockstep.benchmark.compare.run_hosts import NAMESPACES
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.cli.flags import parse_bench
from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows, Status
from lockstep.cli.flags.help import flag_rows
from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.cli.flags.table import TABLE
from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime import host_network
from lockstep.runtime.startup.cluster import PROTOCOLS
from lockstep.runtime.startup.preflight import folder_problems

_ROWS = Rows(Group.OUTPUT)
_SHARED_GROUPS = {Group.RUN, Group.DEVICES, Group.EXCHANGE, Group.OPTIMIZER, Group.DATA, Group.PRECISION}
_NOT_SHARED = {"cross_replica_sync", "num_gpus", "server_protocol"}
_CLUSTER_SIZE = ("ps", "workers")
_KINDS = tuple(kind.value for kind in contestants.ContestantKind)
DEFAULT_SERVERS, DEFAULT_WORKERS = 1, 2
MAX_REPEATS = 100
_BETWEEN = (contestants.ContestantKind.BESIDE.value, contestants.ContestantKind.RANKS.value)
_BETWEEN_HOSTS = ("auto", "grpc+tcp", "grpc", "grpc+ucx")
"""Transports that need nothing but a network."""

OWN_FLAGS: tuple[Flag, ...] = (
    _ROWS.works(
        "program",
        FlagKind.TEXT,
        None,
        "compare a program of your own instead; 'lockstep compare --program --help' has its flags",
        upstream=False,
    ),
    _ROWS.works("repeats", FlagKind.WHOLE, 3, "rounds; each measures every contestant once, in turn", upstream=False),
    _ROWS.works(
        "protocols",
        FlagKind.LIST,
        PROTOCOLS,
        "which of Lockstep's transports (--server_protocol) to measure",
        upstream=False,
    ),
    _ROWS.works("only", FlagKind.LIST, (), f"measure only these: {', '.join(_KINDS)}", upstream=False),
    _ROWS.works(
        "hosts",
        FlagKind.TEXT,
        None,
        "'namespaces': every task on a host of its own, a network namespace of this machine; needs root",
        upstream=False,
    ),
    _ROWS.works("run_timeout", FlagKind.NUMBER, 600.0, "how long one run may take, in seconds", upstream=False),
    _ROWS.works(
        "tf_cnn_benchmarks",
        FlagKind.TEXT,
        None,
        "folder with a copy of tf_cnn_benchmarks, to measure it too",
        upstream=False,
    ),
    _ROWS.works(
        "tf_python", FlagKind.TEXT, None, "a Python that has TensorFlow, for tf_cnn_benchmarks", upstream=False
    ),
    _ROWS.works("json", FlagKind.TEXT, None, "file for all numbers (JSON)", upstream=False),
    _ROWS.works("plot", FlagKind.TEXT, None, "file for a plot of the rates (PNG); needs matplotlib", upstream=False),
    _ROWS.works("verbose", FlagKind.SWITCH, False, "show where the time of a step goes", upstream=False),
)

SHARED_FLAGS: tuple[Flag, ...] = tuple(
    flag
    for flag in TABLE
    if flag.name in _CLUSTER_SIZE
    or (flag.group in _SHARED_GROUPS and flag.status is Status.WORKS and flag.name not in _NOT_SHARED)
)

_HELP = """\
lockstep compare: train the same model in several ways, in turn, and print how fast each is.

  lockstep compare --model=alexnet --batch_size=16 --num_batches=20 --num_threads=1

It measures workers that do not communicate (the limit), one process with all threads, PyTorch DDP, Lockstep over each
of its transports, and tf_cnn_benchmarks if its folder is given. All use the same model, batch, steps, threads, cores.

About the comparison:
{own}

What is trained, as for 'lockstep bench' (without --ps and --workers: one server, two workers):
{shared}
"""


@dataclass(frozen=True, slots=True)
class Request:
    """The comparison that a command line asks for, and where its numbers go."""

    comparison: Comparison
    json_path: Path | None
    plot_path: Path | None
    verbose: bool
    asked_protocols: bool
    """The transports were named explicitly, so one that cannot run here is a failure."""


def parse_compare(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """BadInput lists everything that is wrong; HelpAsked carries the help."""
    line = read_command_line(argv, (*OWN_FLAGS, *SHARED_FLAGS), "compare")
    if line.help_on is not None:
        raise HelpAsked(_HELP.format(own="\n".join(flag_rows(OWN_FLAGS)), shared="\n".join(flag_rows(SHARED_FLAGS))))
    if line.mistakes:
        raise BadInput(line.mistakes)
    sentences = _own_problems(line)
    try:
        bench, flags = _bench(line, environ)
    except BadInput as bad:
        raise BadInput([*sentences, *bad.sentences]) from None
    if not bench.run.batch_size:
        sentences.append(f"the batch size of --model={bench.model} is not known before it runs; add --batch_size=N.")
    if sentences:
        raise BadInput(sentences)
    return _request(line, bench, flags)


def _bench(line: CommandLine, environ: Mapping[str, str]) -> tuple[BenchConfig, tuple[str, ...]]:
    """What ``bench`` makes of the shared flags, and those flags as words without the size of the cluster."""
    shared = {flag.name for flag in SHARED_FLAGS}
    flags = [given.argument() for name, given in line.given.items() if name in shared and name not in _CLUSTER_SIZE]
    servers, workers = _size(line)
    return parse_bench([*flags, f"--ps={servers}", f"--workers={workers}"], environ), tuple(flags)


def _size(line: CommandLine) -> tuple[int, int]:
    servers, workers = line.value("ps"), line.value("workers")
    return (
        servers if isinstance(servers, int) else DEFAULT_SERVERS,
        workers if isinstance(workers, int) else DEFAULT_WORKERS,
    )


def _own_problems(line: CommandLine) -> list[str]:
    sentences = []
    repeats, timeout = line.value("repeats"), line.value("run_timeout")
    assert isinstance(repeats, int)
    assert isinstance(timeout, float)
    if not 1 <= repeats <= MAX_REPEATS:
        sentences.append(f"--repeats={repeats} is out of range; give 1 to {MAX_REPEATS}.")
    if timeout <= 0:
        sentences.append(f"--run_timeout={timeout:g} must be a number of seconds above 0.")
    sentences += unknown_names(line, "only", _KINDS)
    sentences += unknown_names(line, "protocols", PROTOCOLS)
    sentences += _tf_problems(line)
    sentences += _host_problems(line)
    for flag in ("json", "plot"):
        if (path := line.value(flag)) is not None:
            sentences += file_problems(flag, str(path))
    if line.value("plot") is not None and not has_matplotlib():
        sentences.append(
            "--plot needs matplotlib, which is not installed; run pip install 'lockstep-torch[plot]', or leave it out."
        )
    return sentences


def unknown_names(line: CommandLine, flag: str, known: Sequence[str]) -> list[str]:
    given = line.value(flag)
    assert isinstance(given, tuple)
    return [
        f"--{flag}={name} is not known; use one or more of these, separated by commas: {', '.join(known)}."
        for name in given
        if name not in known
    ]


def _tf_problems(line: CommandLine) -> list[str]:
    folder, python, only = line.value("tf_cnn_benchmarks"), line.value("tf_python"), line.value("only")
    assert isinstance(only, tuple)
    sentences = []
    if folder is not None and not (Path(str(folder)) / "tf_cnn_benchmarks.py").is_file():
        sentences.append(
            f"--tf_cnn_benchmarks={folder} has no tf_cnn_benchmarks.py; give the folder scripts/tf_cnn_benchmarks of a "
            "copy of github.com/tensorflow/benchmarks."
        )
    if folder is not None and python is None:
        sentences.append("--tf_cnn_benchmarks needs --tf_python=PATH, a Python that has TensorFlow 2.15.")
    if python is not None and shutil.which(str(python)) is None:
        sentences.append(f"--tf_python={python} is not a program; give the path of a Python that has TensorFlow 2.15.")
    if folder is None and (python is not None or contestants.ContestantKind.TF_CNN.value in only):
        sentences.append("tf_cnn_benchmarks can be measured only from its folder; add --tf_cnn_benchmarks=FOLDER.")
    return sentences


def _host_problems(line: CommandLine) -> list[str]:
    hosts, only = line.value("hosts"), line.value("only")
    assert isinstance(only, tuple)
    if hosts is None:
        return [
            f"--only={name} is measured between hosts only; add --hosts={NAMESPACES}."
            for name in _BETWEEN
            if name in only
        ]
    if hosts != NAMESPACES:
        return [f"--hosts={hosts} is not known; the only kind of hosts is {NAMESPACES}."]
    if missing := host_network.why_not():
        return [
            f"--hosts={NAMESPACES} cannot be used here: {missing}; run it as root where that works, or leave it out."
        ]
    return []


def file_problems(flag: str, path: str) -> list[str]:
    if Path(path).is_dir():
        return [f"--{flag}={path} is a folder; give the name of a file in it."]
    return folder_problems(flag, str(Path(path).parent))


def has_matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def _request(line: CommandLine, bench: BenchConfig, flags: tuple[str, ...]) -> Request:
    servers, workers = _size(line)
    only, protocols = line.value("only"), line.value("protocols")
    folder, python = line.value("tf_cnn_benchmarks"), line.value("tf_python")
    repeats, timeout = line.value("repeats"), line.value("run_timeout")
    assert isinstance(only, tuple)
    assert isinstance(protocols, tuple)
    assert isinstance(repeats, int)
    assert isinstance(timeout, float)
    on_hosts = line.value("hosts") is not None
    if on_hosts and not line.gives("protocols"):
        protocols = _BETWEEN_HOSTS
    known = all_contestants(protocols, with_tf_cnn=folder is not None, on_hosts=on_hosts)
    chosen = tuple(c for c in known if not only or c.kind.value in only)
    threads = bench.devices.num_threads or max(1, len(os.sched_getaffinity(0)) // workers)
    comparison = Comparison(
        bench=dataclasses.replace(bench, local=None),
        bench_flags=tuple(flag for flag in flags if not flag.startswith("--num_threads=")),
        contestants=chosen,
        servers=servers,
        workers=workers,
        threads=threads,
        repeats=repeats,
        run_timeout=timeout,
        tf_cnn=str(folder or ""),
        tf_python=str(python or ""),
        on_hosts=on_hosts,
    )
    json_path, plot_path = line.value("json"), line.value("plot")
    return Request(
        comparison,
        None if json_path is None else Path(str(json_path)),
        None if plot_path is None else Path(str(plot_path)),
        bool(line.value("verbose")),
        line.gives("protocols"),
    )
