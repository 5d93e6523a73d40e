"""``--graph_file``: where each parameter is stored. Text if the name ends in ``txt``, else JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.benchmark.outputs.observers import RunObserver
from lockstep.benchmark.training.job import BenchJob
from lockstep.protocol.core.plan import Plan


class PlanFile(RunObserver):
    """Writes the plan once it is known; a single process has parameters but no plan."""

    def __init__(self, path: str, plan: Plan | None) -> None:
        self._path = Path(path)
        self._plan = plan

    def started(self, job: BenchJob) -> None:
        facts = plan_facts(job, self._plan)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        as_text = self._path.suffix == ".txt"
        self._path.write_text(_text(facts) if as_text else json.dumps(facts, indent=1) + "\n")


def plan_facts(job: BenchJob, plan: Plan | None) -> dict[str, Any]:
    """Model, parameters and, in a cluster, buckets with their servers."""
    facts: dict[str, Any] = {
        "model": job.config.model,
        "parameters": [
            {"name": t.name, "shape": list(t.parameter.shape), "bytes": t.parameter.nbytes} for t in job.trained
        ],
        "buckets": [],
    }
    if plan is not None:
        facts |= {"plan": plan.hash, "servers": plan.servers}
        facts["buckets"] = [
            {
                "bucket": bucket.id,
                "server": f"/job:ps/replica:0/task:{bucket.server}" if plan.servers else "all workers",
                "bytes": bucket.nbytes,
                "offset": bucket.shard_offset,
                "parameters": list(plan.names_in(bucket.id)),
            }
            for bucket in plan.buckets
        ]
    return facts


def _text(facts: dict[str, Any]) -> str:
    lines = [f"model {facts['model']}"]
    lines += [f"parameter {p['name']} {'x'.join(map(str, p['shape']))} {p['bytes']} bytes" for p in facts["parameters"]]
    lines += [
        f"bucket {b['bucket']} on {b['server']} at {b['offset']}, {b['bytes']} bytes: {', '.join(b['parameters'])}"
        for b in facts["buckets"]
    ]
    return "\n".join(lines) + "\n"
