"""``lockstep.ray.run``: the driver's side of a job on Ray."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from lockstep.errors import BadInput
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.ray.directory import Directory
from lockstep.ray.ends import LOST, RayRunError, TaskEnd
from lockstep.ray.host import TaskHost
from lockstep.ray.plan import RayPlan, actor_options, plan_problems
from lockstep.terminal import say

Result = TypeVar("Result")

PLACEMENT_SECONDS: Final = 300.0
AFTER_FAILURE_SECONDS: Final = 60.0
"""How long the other tasks have to report and end after one that failed."""
_ONE_CPU: Final = {"CPU": 1.0}


def run(
    train: Callable[[], Result],
    *,
    servers: int = 1,
    workers: int = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    resources_per_server: Mapping[str, float] | None = None,
    restarts: int = 3,
    strategy: str = "PACK",
    placement_timeout: float = PLACEMENT_SECONDS,
) -> list[Result]:
    """Run ``train`` as every task of a job on the Ray cluster, which ``lockstep.join()`` in it finds.

    Every task has an actor and a bundle of one placement group; resources are a CPU each unless given. A task that is
    killed is started again ``restarts`` times on its node, and by Ray as often elsewhere if its actor or its node is
    lost. Blocks until all tasks have ended. Returns what ``train`` returned on each worker, in their order.

    Raises BadInput if the request cannot be met, and RayRunError if the job failed.
    """
    plan = RayPlan(
        job=f"lockstep-{secrets.token_hex(4)}",
        servers=servers,
        workers=workers,
        server_resources=_ONE_CPU if resources_per_server is None else resources_per_server,
        worker_resources=_ONE_CPU if resources_per_worker is None else resources_per_worker,
        restarts=restarts,
        strategy=strategy,
    )
    if problems := list(plan_problems(plan)):
        raise BadInput(problems)
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    with _placed(ray, plan, placement_timeout) as group, contextlib.ExitStack() as until_end:
        ends = _Tasks(ray, plan, group, until_end).run(train)
    if any(end.exit_code for end in ends.values()):
        raise RayRunError({task.short: end for task, end in ends.items()})
    return [ray.cloudpickle.loads(end.result) for task, end in ends.items() if task.role is Role.WORKER]


def _ray() -> Any:
    try:
        import ray
        import ray.cloudpickle
    except ImportError as error:
        raise BadInput(f"Ray is not installed here ({error}); pip install 'lockstep-torch[ray]'.") from None
    return ray


@contextlib.contextmanager
def _placed(ray: Any, plan: RayPlan, seconds: float) -> Any:
    """The placement group: a bundle a task, of two kinds."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([plan.resources(task) for task in plan.tasks()], strategy=plan.strategy, name=plan.job)
    try:
        if not group.wait(timeout_seconds=seconds):
            raise BadInput(
                f"Ray had no room within {seconds:g} s for {plan.servers} x {dict(plan.server_resources)} and "
                f"{plan.workers} x {dict(plan.worker_resources)} ({plan.strategy}); the cluster has "
                f"{_totals(ray)}. Ask for less, add nodes, or give a longer placement_timeout."
            )
        yield group
    finally:
        remove_placement_group(group)


def _totals(ray: Any) -> dict[str, float]:
    return {name: amount for name, amount in sorted(ray.cluster_resources().items()) if ":" not in name}


class _Tasks:
    """The actors of one job, from their start to the end of the last one."""

    def __init__(self, ray: Any, plan: RayPlan, group: Any, until_end: contextlib.ExitStack) -> None:
        self._ray, self._plan, self._group = ray, plan, group
        self._directory = f"addresses.{plan.job}.ray"
        forever = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}
        directory = ray.remote(**forever)(Directory).options(name=self._directory).remote()
        until_end.callback(ray.kill, directory)
        self._actors = {task: self._actor(place, task) for place, task in enumerate(plan.tasks())}
        for actor in self._actors.values():
            until_end.callback(ray.kill, actor)

    def _actor(self, place: int, task: TaskId) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plan = self._plan
        return (
            self._ray.remote(TaskActor)
            .options(
                name=plan.name(task),
                max_restarts=plan.restarts,
                max_task_retries=-1,  # a call counts a retry each second until Ray knows that a node is lost
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, place),
                **actor_options(plan.resources(task)),
            )
            .remote(task.short, plan.name(task), self._directory)
        )

    def run(self, train: Callable[[], object]) -> dict[TaskId, TaskEnd]:
        """How each task ended; after a failure, those that did not end in time count as lost."""
        ray, plan = self._ray, self._plan
        ports = dict(zip(self._actors, ray.get([actor.place.remote() for actor in self._actors.values()]), strict=True))
        written = ray.cloudpickle.dumps(train)
        runs = {
            actor.run.remote(written, plan.tf_config(task, ports), plan.restarts): task
            for task, actor in self._actors.items()
        }
        say(f"Ray runs {plan.servers} servers and {plan.workers} workers of {plan.job}")
        ends: dict[TaskId, TaskEnd] = {}
        deadline: float | None = None
        while runs and (deadline is None or time.monotonic() < deadline):
            done, _ = ray.wait(list(runs), timeout=1.0)
            for each in done:
                ends[runs.pop(each)] = end = self._end(each)
                if end.exit_code and deadline is None:
                    deadline = time.monotonic() + AFTER_FAILURE_SECONDS
        return {task: ends[task] for task in plan.tasks() if task in ends}

    def _end(self, done: Any) -> TaskEnd:
        try:
            end: TaskEnd = self._ray.get(done)
        except self._ray.exceptions.RayError as error:
            return TaskEnd(LOST, error=str(error).strip().splitlines()[0])
        return end


class TaskActor(TaskHost):
    """A task's host as an actor: it asks Ray where it is, and the directory where the others are."""

    def __init__(self, label: str, name: str, directory_name: str) -> None:
        """The directory by its name: a handle among an actor's arguments is lost with the driver's copy of it."""
        ray = _ray()
        directory = ray.get_actor(directory_name)
        life = ray.get(directory.next_life.remote(name))

        def exchange(address: str) -> Mapping[str, str]:
            known: Mapping[str, str] = ray.get(directory.exchange.remote(name, life, address), timeout=30)
            return known

        super().__init__(label, ray.util.get_node_ip_address(), exchange)
