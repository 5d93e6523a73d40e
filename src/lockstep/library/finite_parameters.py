"""Parameters that became NaN or infinite end a library job by default, or are told of once (``on_nan_parameters``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.library.training_way import JobParts
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.parameter_watch import NotFiniteParameter, ParameterWatch


class FiniteParameters:
    """The watch of one worker: the chief's, since all workers have the same parameters."""

    def __init__(self, node: WorkerNode | CollectiveNode, parts: JobParts, named: Sequence[tuple[str, Tensor]]) -> None:
        self._node = node
        self._parts = parts
        self._watch = ParameterWatch(named) if node.task == CHIEF else None

    def look(self, step: Step, *, last: bool = False) -> None:
        """The parameters are those after ``step``. JobEndedError if that ends the job. ``last``: look in any case."""
        if self._watch is None:
            return
        found = self._watch.look_now(step) if last else self._watch.look(step)
        if found is not None:
            self._judge(found)

    def _judge(self, found: NotFiniteParameter) -> None:
        if self._parts.options.on_nan_parameters == "report":
            self._parts.say(f"{found}; the job goes on, since on_nan_parameters is report")
            return
        remedy = "lower the learning rate, or find the first bad gradient with on_nan='stop'"
        raise JobEndedError(self._node.fail(own_error(f"stopped the job: {found}; {remedy}")))
