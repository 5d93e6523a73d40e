"""The side of a task whose gradients torch.distributed sums: its training thread reports what it hands over.

The bytes of these modes move inside torch.distributed. This side keeps the books (``CollectiveMachine``), which
``lockstep why`` and the watchdog compare, and writes the chief's part of a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.protocol.core.activity import Doing, InputWait, TaskPhase
from lockstep.protocol.core.causes import Cause, own_error
from lockstep.protocol.core.effects import SaveShard, WriteCheckpoint
from lockstep.protocol.core.events import Finished, Prepared, Produced, Reduced, Sealed, StateTaken, StepBegun
from lockstep.protocol.core.ids import CHIEF, BucketId, Step
from lockstep.protocol.core.messages import Layout
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import PROOF_SECONDS, SETTLE_SECONDS
from lockstep.protocol.worker.collective_machine import CollectiveMachine
from lockstep.runtime import phrases
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.shard_saving import ShardSaving, Take
from lockstep.runtime.task.side import CarriesOut, Side

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node

_LOOK_SECONDS = 0.001
"""How often a training thread that waits for a commit looks at what its device has finished."""


def _nothing_to_save(version: int) -> list[NamedTensor]:
    raise ValueError(f"this worker has nothing to save of version {version}")


class CollectiveSide(Side):
    """What a worker does that hands its gradients to torch.distributed."""

    machine: CollectiveMachine

    def __init__(self, node: Node) -> None:
        shape, tells = node.cluster.shape, node.rules.keeps_states
        self.machine = CollectiveMachine(node.task, shape, node.journal, node.cluster.stall_after, tells_state=tells)
        self.before_look: Callable[[], None] = lambda: None
        """Called every second, on the watchdog's thread: passes to ``summed`` what a device has finished meanwhile."""
        self.take: Take = _nothing_to_save
        """Called by the chief's training thread: what goes into a checkpoint of this version."""
        self.saving: ShardSaving = ShardSaving(node)
        self.main = node.main
        self._node = node
        self._plan: Plan | None = None
        self._layout: Layout | None = None
        self._step: Step = -1
        self._to_save: int | None = None
        self._changed = threading.Event()

    @property
    def plan(self) -> Plan | None:
        return self._plan

    # -- called by the training thread --

    def prepare(self, plan: Plan) -> None:
        """All workers have this model, and the values of their first step."""
        node = self._node
        self._plan = plan
        self._step = max(node.start_step, 0) - 1
        entries = plan.parameters
        self._layout = Layout(plan.hash, plan.bucket_bytes, entries, (), (), node.start_step, node.checkpoint)
        node.reporter.phase(TaskPhase.TRAINING)
        node.post(Prepared(plan, self._layout))

    def begin_step(self, step: Step) -> None:
        self._step = step
        self._node.post(StepBegun(step, ()))
        self.main.enter(Doing.COMPUTING, f"step {step}")
        if self._node.faults is not None:
            self._node.faults.at_step(self, step)

    def waits_for_input(self, wait: InputWait) -> None:
        """The training thread waits for data."""
        self.main.wait_for_input(wait)

    def computes_on(self, replica: int) -> None:
        """The training thread has reached this device."""
        self.main.enter(Doing.COMPUTING, f"step {self._step}, replica {replica}")

    def handed_over(self, step: Step, bucket: BucketId) -> None:
        self._node.post(Produced(step, bucket))

    def backward_ended(self, step: Step) -> None:
        """The state, if it is kept, follows with ``tell_state``."""
        self._node.post(Sealed(step, (), (), state=None))
        self.main.enter(Doing.WAITING, f"the sum of step {step}")

    def summed(self, step: Step, bucket: BucketId) -> None:
        self._node.post(Reduced(step, bucket))

    def tell_state(self, step: Step, data: bytes, stuck: str = "") -> None:
        """What this worker takes into ``step`` besides the parameters, or why nobody could begin with it."""
        self._node.post(StateTaken(step, data, stuck))

    def between_steps(self) -> None:
        """The sums are there. If this worker writes checkpoints, wait until it is known whether the values from which
        this step was computed go into one: what follows changes them."""
        if self._node.rules.saves and self._node.task in self._node.cluster.shape.savers:
            self._save_before(self._step)
        self.main.enter(Doing.USER_CODE)

    def _save_before(self, step: Step) -> None:
        """Nothing else holds this worker back: the sums come without the coordinator."""
        while self.machine.committed < step - 1:
            self._node.raise_if_ended()
            self.before_look()
            time.sleep(_LOOK_SECONDS)
        self._node.loop.settle(SETTLE_SECONDS)  # what the commit asks for has reached this side
        self._save_if_due()

    def _save_if_due(self) -> None:
        version, self._to_save = self._to_save, None
        if version is not None:
            self.saving.save(version, self.take)

    def finish(self, steps: Step) -> None:
        """This worker has done all its steps; wait until the whole job has ended, and raise if it ended badly."""
        node = self._node
        node.reporter.phase(TaskPhase.FINISHING)
        self.main.enter(Doing.FINISHING)
        node.post(Finished(steps))
        while node.outcome is None:
            self.before_look()
            self._save_if_due()
            self._changed.wait(0.1)
            self._changed.clear()
        if not node.wait_until_ended().ok:
            node.raise_if_ended()

    def wait_version(self, version: int) -> int:
        """For a drill's fault: wait for a sum of a bucket that is never handed over."""
        while self.machine.committed < version - 1:
            self._node.raise_if_ended()
            self._changed.wait(0.1)
        return version

    def lost(self, problem: str) -> JobEndedError:
        """torch.distributed has failed: another worker, or this one's network, is the reason. The coordinator finds
        out within seconds; return the error to raise."""
        node, deadline = self._node, time.monotonic() + PROOF_SECONDS
        while node.outcome is None and time.monotonic() < deadline:
            self._changed.wait(0.05)
        if node.outcome is None:
            node.fail(own_error(phrases.cannot_reduce(problem)))
        assert node.outcome is not None
        return JobEndedError(node.outcome)

    def drifted(self, step: Step, parameter: str) -> JobEndedError:  # noqa: ARG002 - the node knows the step
        """This worker's parameters are not the chief's."""
        return JobEndedError(self._node.fail(own_error(phrases.drifted(CHIEF, parameter), Cause.DRIFTED)))

    # -- the loop's thread --

    def effects(self) -> CarriesOut:
        return {SaveShard: self._save_shard, WriteCheckpoint: self._write_checkpoint}

    def _save_shard(self, effect: SaveShard) -> None:
        self._to_save = effect.version
        self._changed.set()

    def _write_checkpoint(self, effect: WriteCheckpoint) -> None:
        assert self._layout is not None
        self.saving.write_checkpoint(effect, self._layout)

    def wake(self) -> None:
        self._changed.set()

    def beat(self) -> None:
        self.before_look()

    def stop(self) -> None:
        self.saving.close()
