"""What a job asks of Ray, as plain values: its tasks, their names and what each of them may use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lockstep.protocol.core.ids import Role, TaskId

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_OPTIONS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray's actors have an option of their own for; all others are custom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlan:
    """The tasks of one job."""

    job: str
    servers: int
    workers: int
    server_resources: Mapping[str, float]
    worker_resources: Mapping[str, float]
    restarts: int
    strategy: str

    def tasks(self) -> tuple[TaskId, ...]:
        """In the order of the bundles: servers first."""
        servers = (TaskId(Role.SERVER, index) for index in range(self.servers))
        return (*servers, *(TaskId(Role.WORKER, index) for index in range(self.workers)))

    def resources(self, task: TaskId) -> dict[str, float]:
        return dict(self.server_resources if task.role is Role.SERVER else self.worker_resources)

    def name(self, task: TaskId) -> str:
        """Under which others look a task up, wherever it is."""
        return f"{task.role.value}-{task.index}.{self.job}.ray"

    def tf_config(self, task: TaskId, ports: Mapping[TaskId, int]) -> str:
        """The cluster as the task is told of it: names, and the ports that stay."""
        cluster: dict[str, list[str]] = {}
        for each in self.tasks():
            cluster.setdefault(each.role.value, []).append(f"{self.name(each)}:{ports[each]}")
        return json.dumps({"cluster": cluster, "task": {"type": task.role.value, "index": task.index}})


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that uses its whole bundle."""
    custom = {name: amount for name, amount in resources.items() if name not in _OPTIONS}
    known = {option: resources.get(name, 0) for name, option in _OPTIONS.items() if name in resources}
    return {"num_cpus": 0, **known, "resources": custom}


def plan_problems(plan: RayPlan) -> Iterator[str]:
    """One sentence for everything that cannot be."""
    if plan.workers < 1:
        yield f"workers={plan.workers} leaves nobody to train; give 1 or more."
    if plan.servers < 0:
        yield f"servers={plan.servers} is negative; give 0 or more."
    if plan.restarts < 0:
        yield f"restarts={plan.restarts} is negative; give 0 or more."
    if plan.strategy not in STRATEGIES:
        yield f"strategy={plan.strategy!r} is not known; use one of: {', '.join(STRATEGIES)}."
    for which, resources in (("worker", plan.worker_resources), ("server", plan.server_resources)):
        if not any(amount > 0 for amount in resources.values()) or min(resources.values()) < 0:
            yield f"resources_per_{which}={dict(resources)} reserves nothing; give, for example, {{'CPU': 1}}."
