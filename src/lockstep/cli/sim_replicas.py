"""``lockstep sim --server_replicas=1``: a kill at every event of a small job with second homes, or at every two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.cli.sim import SimRequest
from lockstep.cli.sim_search import progress
from lockstep.errors import BadInput
from lockstep.sim.pool import parallel
from lockstep.sim.replicas.search import ReplicaScenario, ReplicaTally, first_kills, search_one, search_two, ways

_ALLOWED = {"server_replicas", "kills", "workers", "ps", "steps", "seeds", "first", "processes", "json"}
_SHOWN = 3


def run_replicas(asked: SimRequest) -> int:
    """Search as requested and print the result; returns the exit code."""
    odd = sorted(asked.given() - _ALLOWED)
    if odd:
        raise BadInput(f"--{odd[0]} does not apply to --server_replicas; leave it out.")
    servers = asked.servers(2)
    if servers < 2:
        raise BadInput("--server_replicas=1 needs a second server for the second homes; give --ps=2 or more.")
    kills, tally = asked.whole("kills", 1), ReplicaTally()
    for found in _searches(list(_scenarios(asked, servers)), kills, asked.whole("processes", 2)):
        tally.add(found)
    report = _as_json(tally, servers, kills, asked)
    target = asked.text("json")
    if target and target != "-":
        Path(target).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1) if target == "-" else _as_text(tally, report))
    return 1 if tally.broken else 0


def _scenarios(asked: SimRequest, servers: int) -> Iterator[ReplicaScenario]:
    for seed in range(asked.whole("first", 0), asked.whole("first", 0) + asked.whole("seeds", 1)):
        workers, steps = asked.whole("workers", 2), asked.whole("steps", 2)
        yield from ways(ReplicaScenario(seed, servers, workers, steps, buckets=servers + 1))


def _searches(scenarios: list[ReplicaScenario], kills: int, processes: int) -> Iterator[ReplicaTally]:
    search: Callable[..., ReplicaTally]
    jobs: list[tuple[Any, ...]]
    undisturbed = ReplicaTally()
    if kills == 2:
        search, jobs = search_two, [(one, kill) for one in scenarios for kill in first_kills(undisturbed, one)]
    else:
        search, jobs = search_one, [(replace(one, saves=saves),) for one in scenarios for saves in (False, True)]
    yield undisturbed
    with progress(len(jobs), "playing") as advance:
        for tally in parallel(search, jobs, processes):
            advance()
            yield tally


def _as_json(tally: ReplicaTally, servers: int, kills: int, asked: SimRequest) -> dict[str, Any]:
    return {
        "servers": servers,
        "workers": asked.whole("workers", 2),
        "steps": asked.whole("steps", 2),
        "kills": kills,
        "runs": tally.runs,
        "events": tally.events,
        "takeovers": tally.takeovers,
        "endings": dict(tally.endings.most_common()),
        "broken": [{"rule": found.broken.rule.value, "text": found.text} for _, found in tally.broken],
    }


def _as_text(tally: ReplicaTally, report: dict[str, Any]) -> str:
    each = "one kill" if report["kills"] == 1 else "two kills"
    size = f"{report['servers']} servers and {report['workers']} workers, {report['steps']} steps each"
    lines = [
        f"{tally.runs} runs of {size}, with {each} in each: {tally.events} events",
        f"another server took the coordinator's place in {tally.takeovers} of them",
        "how the runs ended:",
        *(f"  {count:7}  {ending}" for ending, count in tally.endings.most_common()),
        f"runs that broke a rule: {len(tally.broken)}",
    ]
    for scenario, found in tally.broken[:_SHOWN]:
        lines.append(f"\n{scenario}\n{found}")
    return "\n".join(lines)
