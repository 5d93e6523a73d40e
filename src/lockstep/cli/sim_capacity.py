"""The half of ``lockstep sim`` that answers how long a step takes, and how many servers a network needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.sim import SimRequest
from lockstep.cli.sim_search import progress
from lockstep.errors import BadInput
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import ALIGNMENT, aligned
from lockstep.sim.capacity import PARTS, CapacityCase, CapacityMeasurement, enough, growth_cases, measure, server_cases
from lockstep.sim.pool import parallel

MEBIBYTE = 1 << 20
SEARCH = "search"
_MOST_SERVERS = 256
_ROW_ELEMENTS = 1 << 18


def run_capacity(asked: SimRequest) -> int:
    """Measure what was requested and print it; returns the exit code."""
    searching = asked.text("ps") == SEARCH
    case = _case(asked, 1 if searching else asked.servers(2))
    report = _search(asked, case) if searching else _report(asked, case)
    text = json.dumps(report, indent=1)
    target = asked.text("json")
    if target and target != "-":
        Path(target).write_text(text + "\n")
    print(text if target == "-" else "\n".join(as_text(report)))
    if asked.text("plot"):
        from lockstep.cli.sim_plot import draw

        draw(report, asked.text("plot"))
    return 0


# -- the case --


def _case(asked: SimRequest, servers: int) -> CapacityCase:
    return CapacityCase(
        workers=asked.whole("workers", 8),
        servers=servers,
        steps=asked.whole("steps", 3),
        parameters=_parameters(asked),
        bucket_bytes=max(ALIGNMENT, aligned(int(asked.number("bucket_mb", 4.0) * MEBIBYTE))),
        bandwidth=asked.number("gbit", 25.0) * 1e9 / 8,
        latency=asked.number("latency_us", 50.0) / 1e6,
        compute=asked.number("compute_ms", 300.0) / 1e3,
        jitter=asked.number("jitter", 0.05),
        store_bandwidth=asked.number("store_gb", 4.0) * 1e9,
        loop_seconds=asked.number("loop_us", 30.0) / 1e6,
        shared_hosts="shared_hosts" in asked.switches,
    )


def _parameters(asked: SimRequest) -> tuple[ParameterEntry, ...]:
    """The real list of a built-in model, or that many MiB in rows of 1 MiB."""
    if "model_mb" in asked.numbers:
        elements = max(1, int(asked.number("model_mb", 0.0) * MEBIBYTE / 4))
        sizes = [_ROW_ELEMENTS] * (elements // _ROW_ELEMENTS) + [elements % _ROW_ELEMENTS] * (
            elements % _ROW_ELEMENTS > 0
        )
        return tuple(ParameterEntry(f"p{i}", size, "float32", 0) for i, size in enumerate(sizes))
    from lockstep.benchmark.models.catalogue import UnknownModel, check_model_name

    name = asked.text("model", "resnet50")
    try:
        check_model_name(name)
    except UnknownModel as error:
        raise BadInput(str(error)) from error
    return parameters_of(name)


def parameters_of(model: str) -> tuple[ParameterEntry, ...]:
    """The trained parameters of a model, in its own order. Built without memory for them."""
    import torch

    from lockstep.benchmark.models import build_model, dataset_classes

    with torch.device("meta"):
        module = build_model(model, "imagenet", dataset_classes("imagenet"))
    return tuple(
        ParameterEntry(name, parameter.numel(), str(parameter.dtype).removeprefix("torch."), 0)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    )


# -- measuring --


def _measure_all(asked: SimRequest, cases: Sequence[CapacityCase], what: str) -> list[CapacityMeasurement]:
    measured: list[CapacityMeasurement] = []
    with progress(len(cases), what) as step:
        for one in parallel(measure, [(case,) for case in cases], asked.whole("processes", 2)):
            measured.append(one)
            step()
    return measured


def _report(asked: SimRequest, case: CapacityCase) -> dict[str, Any]:
    grown = {} if asked.text("growth", "yes") == "no" else growth_cases(case)
    # The point that all three series share is measured once.
    cases = list(dict.fromkeys([case, *(one for series in grown.values() for one in series)]))
    found = dict(zip(cases, _measure_all(asked, cases, "simulating"), strict=True))
    return {
        "case": _case_fields(found[case]),
        "measured": _fields(found[case]),
        "growth": {name: [_fields(found[one]) for one in series] for name, series in grown.items()},
    }


def _search(asked: SimRequest, case: CapacityCase) -> dict[str, Any]:
    most = min(_MOST_SERVERS, max(1, len(case.plan().buckets)))
    rows = _measure_all(asked, server_cases(case, most), "simulating")
    share = asked.number("enough", 0.95)
    chosen = enough(rows, share)
    assert chosen is not None
    return {
        "case": _case_fields(chosen),
        "measured": _fields(chosen),
        "search": {"enough": share, "servers": chosen.case.servers, "rows": [_fields(row) for row in rows]},
        "growth": {},
    }


def _case_fields(one: CapacityMeasurement) -> dict[str, Any]:
    case = one.case
    return {
        "workers": case.workers,
        "servers": case.servers,
        "steps": case.steps,
        "model_mb": one.model_bytes / MEBIBYTE,
        "buckets": one.buckets,
        "bucket_mb": case.bucket_bytes / MEBIBYTE,
        "gbit": case.bandwidth * 8 / 1e9,
        "latency_us": case.latency * 1e6,
        "compute_ms": case.compute * 1e3,
        "jitter": case.jitter,
        "store_gb": case.store_bandwidth / 1e9,
        "loop_us": case.loop_seconds * 1e6,
        "shared_hosts": case.shared_hosts,
    }


def _fields(one: CapacityMeasurement) -> dict[str, Any]:
    return {
        "workers": one.case.workers,
        "servers": one.case.servers,
        "gbit": one.case.bandwidth * 8 / 1e9,
        "step_ms": one.step * 1e3,
        "parts_ms": {name: one.parts[name] * 1e3 for name in PARTS},
        "efficiency": one.efficiency,
        "busy": {name: {"mean": busy.mean, "most": busy.most} for name, busy in one.busy.items()},
        "bottleneck": one.bottleneck,
        "events": one.events,
    }


# -- the text --


def as_text(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    case, measured = report["case"], report["measured"]
    idle = case["servers"] - case["buckets"]
    lines = [
        f"{case['workers']} workers, {case['servers']} servers, {case['model_mb']:.1f} MiB of parameters in "
        f"{case['buckets']} buckets; {case['gbit']:g} Gbit/s per host, {case['latency_us']:g} us, "
        f"{case['compute_ms']:g} ms of computation per step",
        "",
        f"a step takes {measured['step_ms']:.1f} ms, of which workers compute {measured['efficiency']:.0%}:",
    ]
    lines += [f"  {name:<12} {measured['parts_ms'][name]:9.1f} ms   {_MEANING[name]}" for name in PARTS]
    lines += ["", "how busy (mean, busiest):"]
    lines += [f"  {name:<20} {busy['mean']:6.0%} {busy['most']:6.0%}" for name, busy in measured["busy"].items()]
    lines += ["", _advice(measured)]
    if idle > 0:
        lines.append(
            f"{idle} of the servers have no bucket: there are only {case['buckets']}; use a smaller --bucket_mb."
        )
    for name, rows in report["growth"].items():
        lines += ["", *_table(f"how a step grows with {_AXES[name][0]}", name, rows)]
    if "search" in report:
        lines += [
            "",
            *_table("steps by the number of servers", "servers", report["search"]["rows"]),
            "",
            _answer(report),
        ]
    return lines


_MEANING = {
    "compute": "forward and backward of a typical worker; gradients that are ready leave meanwhile",
    "stragglers": "until the slowest worker has finished computing",
    "gradients": "until the last gradient is on its server",
    "update": "until the last server has updated",
    "parameters": "until the last worker has the new parameters",
}
_AXES: Mapping[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "workers": ("the workers", lambda row: f"{row['workers']}"),
    "servers": ("the servers", lambda row: f"{row['servers']}"),
    "bandwidth": ("the adapters' rate", lambda row: f"{row['gbit']:g} Gbit/s"),
}


def _table(title: str, axis: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    show = _AXES[axis][1]
    lines = [title, f"  {'':>14} {'step ms':>9} " + " ".join(f"{name:>10}" for name in PARTS) + "   busiest"]
    for row in rows:
        parts = " ".join(f"{row['parts_ms'][name]:10.1f}" for name in PARTS)
        most = row["busy"][row["bottleneck"]]["most"]
        lines.append(f"  {show(row):>14} {row['step_ms']:9.1f} {parts}   {row['bottleneck']} {most:.0%}")
    return lines


def _advice(measured: dict[str, Any]) -> str:
    name = measured["bottleneck"]
    most = measured["busy"][name]["most"]
    if most < 0.5 and measured["efficiency"] >= 0.9:
        return f"nothing is busy half of the time; the busiest is {name} with {most:.0%}: computation is the limit."
    if most < 0.5:
        return (
            f"nothing is busy half of the time; the busiest is {name} with {most:.0%}. What remains is the round trip "
            "of the last buckets: sent, updated and sent back, one after the other. A smaller --bucket_mb shortens it."
        )
    return f"the limit is {name}: the busiest one works {most:.0%} of the time. {_REMEDY[name]}"


_REMEDY = {
    "server adapter in": "More servers, or servers with faster adapters, shorten 'gradients'.",
    "server adapter out": "More servers, or servers with faster adapters, shorten 'parameters'.",
    "worker adapter in": "Only faster adapters of the workers help; more servers do not.",
    "worker adapter out": "Only faster adapters of the workers help; more servers do not.",
    "server update": "More servers, or servers with faster memory, shorten 'update'.",
    "server loop": "More servers, or larger buckets, leave each server fewer events.",
}


def _answer(report: dict[str, Any]) -> str:
    search, case = report["search"], report["case"]
    best = min(row["step_ms"] for row in search["rows"])
    return (
        f"{search['servers']} servers are enough for {case['workers']} workers on this network: a step takes "
        f"{report['measured']['step_ms']:.1f} ms, {best / report['measured']['step_ms']:.0%} of the best speed of any "
        f"number up to {search['rows'][-1]['servers']}."
    )
