"""Which files a run writes besides its output. Only the chief (or a single process) writes them, except for traces."""

from __future__ import annotations

from lockstep.benchmark.outputs.graph_file import PlanFile
from lockstep.benchmark.outputs.metric_log import MetricLog
from lockstep.benchmark.outputs.observers import Observers, RunObserver, StepFacts
from lockstep.benchmark.outputs.tracing import TraceObserver
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.job import BenchJob
from lockstep.protocol.core.activity import Learning, TaskPhase
from lockstep.protocol.core.ids import CHIEF
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.worker_node import WorkerNode


class _PhaseTeller(RunObserver):
    """Reports the worker's progress, so that a status line says "training" and not "warming up", and a dashboard has
    throughput and loss."""

    def __init__(self, node: WorkerNode | CollectiveNode) -> None:
        self._node = node
        self._batch = 0

    def started(self, job: BenchJob) -> None:
        self._batch = job.global_batch
        self._node.main.learning = Learning(self._batch)
        self._node.phase(TaskPhase.WARMING_UP)

    def step(self, facts: StepFacts) -> None:
        self._node.main.learning = Learning(self._batch, facts.loss, facts.step)

    def warmed_up(self) -> None:
        self._node.phase(TaskPhase.TRAINING)


def observers_of(job: BenchJob, node: WorkerNode | CollectiveNode | None) -> Observers:
    """All observers in this process."""
    output = job.config.output
    members: list[RunObserver] = [] if node is None else [_PhaseTeller(node)]
    if output.trace_file is not None:
        members.append(TraceObserver(job, node))
    if job.config.task in (None, CHIEF):
        if output.benchmark_log_dir is not None:
            members.append(MetricLog(output.benchmark_log_dir, output.benchmark_test_id))
        if output.graph_file is not None:
            members.append(PlanFile(output.graph_file, node.plan if node is not None else None))
        if output.summary_verbosity and output.train_dir is not None:
            # Imported here, because it needs the packages of the extra "data".
            from lockstep.benchmark.outputs.summaries import Summaries

            members.append(Summaries(job, output.train_dir, output.summary_verbosity, output.save_summaries_steps))
        members += evaluation_events(job.config)
    return Observers(members)


def evaluation_events(config: BenchConfig) -> list[RunObserver]:
    """Observers of evaluations only, during training or instead of it."""
    if config.evaluation.folder is None:
        return []
    from lockstep.benchmark.outputs.summaries import EvaluationEvents

    return [EvaluationEvents(config.evaluation.folder)]
