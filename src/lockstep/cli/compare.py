"""``lockstep compare``: trains one model in several ways on this machine, in turn, and prints a table of speeds."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lockstep.benchmark.compare.results import Measurement, Row, as_json, detail_lines, table
from lockstep.benchmark.compare.run_hosts import NAMESPACES
from lockstep.benchmark.compare.runs import CHILD_FLAG, Runner
from lockstep.cli.compare_flags import Request, parse_compare
from lockstep.cli.compare_program import names_program, run_program
from lockstep.cli.compare_turns import TurnBar, about_machine, in_turns
from lockstep.cli.flags import parse_bench
from lockstep.errors import EXIT_FAILED


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if argv and argv[0].startswith(CHILD_FLAG):
        return _run_child(argv[0].removeprefix(CHILD_FLAG), argv[1:])
    # A batch system's SIGTERM must end the programs that were started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _as_interrupt)
    if names_program(argv):
        return run_program(argv)
    request = parse_compare(argv, os.environ)
    rows = _measure_all(request)
    for line in _report(request, rows):
        print(line)
    if request.json_path is not None:
        request.json_path.write_text(json.dumps(as_json(rows, _about(request)), indent=1) + "\n")
        print(f"wrote {request.json_path}")
    if request.plot_path is not None:
        from lockstep.cli.compare_plot import draw

        draw(rows, _title(request), request.plot_path)
        print(f"wrote {request.plot_path}")
    return EXIT_FAILED if _is_failure(request, rows) else 0


def _as_interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def _run_child(what: str, argv: Sequence[str]) -> int:
    """This process is one of the compared programs."""
    from lockstep.benchmark.compare.start_barrier import StartBarrier

    kind, rank, _, patience, *addresses = what.split(",")
    config = parse_bench(argv, os.environ)
    barrier = StartBarrier(sys.stdin, sys.stdout)
    if kind == "ddp":
        from lockstep.benchmark.compare.ddp_loop import run_ddp

        run_ddp(config, int(rank), addresses, float(patience), barrier)
    elif kind == "ranks":
        from lockstep.cli.compare_ranks import run_rank

        run_rank(config, int(rank), addresses, barrier)
    else:
        from lockstep.benchmark.compare.solo_loop import run_solo

        run_solo(config, int(rank), barrier)
    return 0


def _measure_all(request: Request) -> list[Row]:
    """Run all rounds."""
    comparison = request.comparison
    runner = Runner(comparison, os.environ)
    rows = [Row(contestant) for contestant in comparison.contestants]
    with TurnBar(len(rows) * comparison.repeats) as bar:
        for number, row in in_turns(rows, comparison.repeats):
            bar.begins(f"round {number} of {comparison.repeats}: {row.contestant.name}")
            row.runs.append(_measure(runner, row))
            bar.ended(_words(row.runs[-1]))
    return rows


def _measure(runner: Runner, row: Row) -> Measurement:
    """Do not retry in every round what cannot run here."""
    cannot = next((run.cannot for run in row.runs if run.cannot), "")
    return Measurement(cannot=cannot) if cannot else runner.measure(row.contestant)


def _words(run: Measurement) -> str:
    if run.failure:
        return f"failed: {run.failure}"
    return f"cannot run here: {run.cannot}" if run.cannot else f"{run.images_per_second:.1f} images/sec"


def _report(request: Request, rows: Sequence[Row]) -> list[str]:
    lines = [_title(request), "", *table(rows)]
    for row in rows:
        if row.trouble:
            lines += ["", f"{row.contestant.name}: {row.trouble}"]
    if request.comparison.on_hosts:
        lines += ["", *(f"{row.contestant.name}: {path}" for row in rows for path in row.paths), *_not_run(request)]
    if request.verbose:
        details = [line for row in rows for line in detail_lines(row)]
        lines += ["", *details] if details else []
    return [*lines, ""]


def _not_run(request: Request) -> list[str]:
    """What belongs into this table and was not there to be measured."""
    if request.comparison.tf_cnn:
        return []
    return ["tf_cnn_benchmarks was not measured: give --tf_cnn_benchmarks=FOLDER and --tf_python=PATH."]


def _title(request: Request) -> str:
    comparison = request.comparison
    run, cores = comparison.bench.run, len(os.sched_getaffinity(0))
    where = ", every task on a host of its own (network namespaces)" if comparison.on_hosts else ""
    return (
        f"{comparison.bench.model}, batch {run.batch_size} per worker, {run.num_batches} steps, {comparison.servers} "
        f"server(s), {comparison.workers} workers with {comparison.threads} thread(s) each, {cores} cores, "
        f"{comparison.repeats} round(s){where}"
    )


def _about(request: Request) -> dict[str, Any]:
    comparison = request.comparison
    return {
        "model": comparison.bench.model,
        "batch_size": comparison.bench.run.batch_size,
        "num_batches": comparison.bench.run.num_batches,
        "num_warmup_batches": comparison.bench.run.num_warmup_batches,
        "servers": comparison.servers,
        "workers": comparison.workers,
        "threads": comparison.threads,
        "device": comparison.bench.devices.device,
        "hosts": NAMESPACES if comparison.on_hosts else "",
        "flags": list(comparison.bench_flags),
        **about_machine(),
    }


def _is_failure(request: Request, rows: Sequence[Row]) -> bool:
    """Whether something that was requested has no numbers."""
    return any(row.failed or (request.asked_protocols and row.contestant.protocol and not row.rates) for row in rows)
