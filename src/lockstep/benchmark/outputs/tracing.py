"""``--trace_file``: the last steps of this task for a trace viewer."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from lockstep.benchmark.outputs.observers import RunObserver
from lockstep.benchmark.training.job import BenchJob
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.trace.task_trace import Span, TraceWindow, trace_of, trace_path, write_trace

_PARTS_OF_A_STEP = 3


class TraceObserver(RunObserver):
    """Keeps the newest steps that the journal still has, and writes them at the end."""

    def __init__(self, job: BenchJob, node: WorkerNode | CollectiveNode | None) -> None:
        self._config = job.config
        self._node = node
        self._spans: deque[Span] = deque(maxlen=_PARTS_OF_A_STEP * self._config.output.trace_steps)
        self._steps_seen = 0

    @contextlib.contextmanager
    def during(self, what: str, step: int) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._spans.append(Span(what, step, begin, time.monotonic()))
        self._steps_seen = step + 1

    def close(self) -> None:
        output = self._config.output
        assert output.trace_file is not None
        task = self._config.task
        window = TraceWindow(max(0, self._steps_seen - output.trace_steps), self._steps_seen)
        records = list(self._node.journal) if self._node is not None else []
        plan: Plan | None = self._node.plan if self._node is not None else None
        write_trace(trace_path(output.trace_file, task), trace_of(task, self._spans, records, plan, window))
