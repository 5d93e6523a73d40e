"""A rank whose gradients torch.distributed carries: gloo, or NCCL between GPUs.

It is a task like every other: the coordinator on worker 0 forms the cluster, commits steps, decides on losses,
checkpoints and the end. Each worker is linked with the coordinator only, because no tensor takes these links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.protocol.core.plan import Plan
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.task.collective_side import CollectiveSide
from lockstep.runtime.task.node import Node, Say
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.shard_saving import Take


class CollectiveNode(Node):
    """One worker. What its training thread calls is described in ``collective_side.py``."""

    def __init__(self, config: NodeConfig, say: Say, reporter: TaskReporter) -> None:
        super().__init__(replace(config, tell_paths=False), say, reporter, carries_tensors=False)
        self.reducing = side = CollectiveSide(self)
        self.prepare, self.begin_step, self.handed_over = side.prepare, side.begin_step, side.handed_over
        self.backward_ended, self.summed, self.between_steps = side.backward_ended, side.summed, side.between_steps
        self.waits_for_input, self.computes_on = side.waits_for_input, side.computes_on
        self.tell_state, self.finish = side.tell_state, side.finish
        self.lost, self.drifted = side.lost, side.drifted
        self.tell_unsaved = side.saving.tell_unsaved
        self._compose(side)

    @property
    def plan(self) -> Plan | None:
        return self.reducing.plan

    def look_with(self, before_look: Callable[[], None]) -> None:
        """Called every second: passes to ``summed`` what a device has finished meanwhile."""
        self.reducing.before_look = before_look

    def save_with(self, take: Take) -> None:
        """Called on the chief's training thread: what goes into a checkpoint."""
        self.reducing.take = take
