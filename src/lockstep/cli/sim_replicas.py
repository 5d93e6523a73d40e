"""``lockstep sim --server_replicas=1``: a kill at every event of a small job with second homes, or at every two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.cli.sim import SimRequest
from lockstep.cli.sim_search import progress
from lockstep.errors import BadInput
from lockstep.sim.pool import parallel
from lockstep.sim.replicas.search import KILLS, ReplicaTally, play, points_of, search_one, search_two
from lockstep.sim.replicas.world import HarmPoint, ReplicaScenario

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
    for seed in range(asked.whole("first", 0), asked.whole("first", 0) + asked.whole("seeds", 1)):
        for returns in (True, False):
            scenario = ReplicaScenario(
                seed=seed,
                servers=servers,
                workers=asked.whole("workers", 2),
                buckets=servers + 1,
                steps=asked.whole("steps", 2),
                servers_return=returns,
            )
            for found in _searches(scenario, kills, asked.whole("processes", 2)):
                tally.add(found)
    report = _as_json(tally, servers, kills, asked)
    target = asked.text("json")
    if target and target != "-":
        Path(target).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1) if target == "-" else _as_text(tally, report))
    return 1 if tally.broken else 0


def _searches(scenario: ReplicaScenario, kills: int, processes: int) -> list[ReplicaTally]:
    if kills == 1:
        return [search_one(scenario)]
    jobs = [(scenario, point) for point in points_of(play(scenario)) if _is_used(point)]
    with progress(len(jobs), "playing") as advance:
        found = []
        for tally in parallel(search_two, jobs, processes):
            found.append(tally)
            advance()
    return found


def _is_used(point: HarmPoint) -> bool:
    """Of two kills: what had been sent arrives and the effects were carried out, or neither."""
    return (point.harm is KILLS[0]) == point.effects_done


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
    lines += [f"\n{found}" for _, found in tally.broken[:_SHOWN]]
    return "\n".join(lines)
