"""The task of ``lockstep bench``: a server, a worker, or a single process.

The node starts before torch is imported, so that the others see this task, and its reason for not being ready, at once.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lockstep.benchmark.settings.config import BenchConfig, recovery_rules, server_device, settings
from lockstep.cli.progress import Output
from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_VERDICT, BadInput
from lockstep.library.launcher import LAUNCHED_VARIABLE
from lockstep.protocol.coordinator.recovery import Beginning, LossPolicy, RecoveryRules
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.faults import Fault, parse_faults
from lockstep.protocol.core.ids import CHIEF, Role
from lockstep.protocol.core.journal import Happening
from lockstep.runtime.checkpoint.resuming import beginning_in
from lockstep.runtime.garbage import spared_collector
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.monitor.task_process import NO_FORMER_LIFE, FormerLife
from lockstep.runtime.reading_process import InputLost
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import JobEndedError, Outcome
from lockstep.runtime.task.signals import TaskSignals
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.terminal import say_over as say

if TYPE_CHECKING:
    from lockstep.runtime.task.collective_node import CollectiveNode
    from lockstep.runtime.task.server_node import ServerNode
    from lockstep.runtime.task.store import ShardStore
    from lockstep.runtime.task.worker_node import WorkerNode


FAULTS_VARIABLE = "LOCKSTEP_FAULTS"


def run_task(config: BenchConfig, reporter: TaskReporter, former: FormerLife) -> int:
    """Run one task of a cluster; ``reporter`` leads to its monitor.

    If there was a former incarnation, the job has already begun, from scratch if that was requested.
    """
    if former.exists:
        config = dataclasses.replace(config, output=dataclasses.replace(config.output, from_scratch=False))
    assert config.task is not None
    assert config.cluster is not None
    signals = TaskSignals(config.task, say, config.cluster.grace)
    signals.install()
    reporter.phase(TaskPhase.IMPORTING_TORCH)
    if config.exchange.is_collective:
        return _run_collective(config, reporter, signals)
    if config.task.role is Role.SERVER:
        return _run_server(config, reporter, signals, former)
    return _run_worker(config, reporter, signals, finished=former.finished)


def node_config(config: BenchConfig, *, returning: bool = False, former: FormerLife = NO_FORMER_LIFE) -> NodeConfig:
    """What the runtime needs to know about this run. ``returning``: the job restarts after a server was lost.
    ``former``: of this server."""
    assert config.cluster is not None
    cluster, rules = config.cluster, rules_here(config, os.environ)
    if returning:
        cluster = dataclasses.replace(cluster, startup_timeout=cluster.rejoin_timeout)
    return NodeConfig(
        cluster=cluster,
        recovery=rules,
        beginning=_beginning(config, rules, from_scratch=config.output.from_scratch and not returning),
        train_dir=(config.output.train_dir or "") if rules.saves else "",
        checkpoints_kept=config.output.max_ckpts_to_keep,
        returning=returning,
        later=former.exists and bool(rules.server_replicas) and not rules.returns,
        former_job=former.job,
        settings=settings(config),
        synchronous=config.exchange.cross_replica_sync,
        eager=True,
        tell_paths=True,
        watch=WatchSettings(on_stall=config.cluster.on_stall, pages=config.cluster.pages),
        run_folder=config.output.train_dir or "",
        faults=planted_faults(os.environ),
        give_up=lambda outcome: os._exit(_exit_code(outcome)),
    )


def _beginning(config: BenchConfig, rules: RecoveryRules, *, from_scratch: bool) -> Beginning:
    assert config.cluster is not None
    if not rules.saves or config.task != config.cluster.shape.coordinator:
        return Beginning()
    assert config.output.train_dir is not None
    return beginning_in(config.output.train_dir, settings(config), say, from_scratch=from_scratch)


def rules_here(config: BenchConfig, environ: Mapping[str, str]) -> RecoveryRules:
    """What this run does about losses: nothing, in a local cluster whose monitors restart nothing."""
    rules = recovery_rules(config)
    assert config.cluster is not None
    if LAUNCHED_VARIABLE not in environ or config.cluster.restarts:
        return rules
    shrinks = rules.on_worker_loss is LossPolicy.SHRINK
    policy = LossPolicy.SHRINK if shrinks else LossPolicy.ABORT
    return dataclasses.replace(rules, on_worker_loss=policy, returns=False)


def planted_faults(environ: Mapping[str, str]) -> tuple[Fault, ...]:
    """The faults that a drill plants: the variable LOCKSTEP_FAULTS holds one per line (docs/drills.md)."""
    try:
        return parse_faults(environ.get(FAULTS_VARIABLE, ""))
    except ValueError as error:
        raise BadInput(f"{FAULTS_VARIABLE} cannot be read: {error}; unset it: it is only for drills.") from error


def _refuse_missing_gpu(config: BenchConfig) -> None:
    """With second homes a server may not update on its CPU where the others have a GPU. Imports torch only for that."""
    if config.cluster is None or not config.cluster.server_replicas or server_device(config) != "gpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise BadInput(
            "--server_replicas=1 needs servers that all update on the same kind of device, and torch sees no GPU on "
            "this server's host; give --local_parameter_device=cpu to all tasks."
        )


def _run_server(config: BenchConfig, reporter: TaskReporter, signals: TaskSignals, former: FormerLife) -> int:
    _refuse_missing_gpu(config)

    def make_store() -> ShardStore:
        from lockstep.benchmark.training.run import server_store

        return server_store(config)

    returning = False
    while True:
        code = _serve(config, reporter, signals, make_store, former, returning=returning)
        if code is not None:
            return code
        returning = True
        gc.collect()  # as in ``_run_worker``


def _serve(
    config: BenchConfig,
    reporter: TaskReporter,
    signals: TaskSignals,
    make_store: Callable[[], ShardStore],
    former: FormerLife,
    *,
    returning: bool,
) -> int | None:
    """Run one incarnation as a server; returns the exit code, or None if the job restarts."""
    from lockstep.runtime.task.server_node import ServerNode

    node = ServerNode(node_config(config, returning=returning, former=former), make_store, say, reporter)
    signals.attach(node)
    try:
        node.start()
        assert config.task is not None
        Output().emit(f"Running parameter server {config.task.index}")
        reporter.phase(TaskPhase.IMPORTING_TORCH)
        from lockstep.training.server.named_optimizer import warm_up

        warm_up()  # while the cluster forms, so that the first bucket does not wait for it
        reporter.phase_after(
            TaskPhase.IMPORTING_TORCH, TaskPhase.CONNECTING if node.forming else TaskPhase.COMPARING_SETTINGS
        )
        outcome = _wait_for_the_end(node)
        if node.refused:
            return EXIT_BAD_INPUT
        if outcome.again:
            return None
        node.see_others_off()
        outcome = dataclasses.replace(outcome, unsaved=node.tell_unsaved())
        _write_server_trace(config, node)
        if config.output.verbose:
            from lockstep.benchmark.outputs.times import server_line

            Output().emit(server_line(node))
        if config.output.timing_dir is not None:
            from lockstep.benchmark.outputs.times import server_times, write_times

            write_times(config.output.timing_dir, config.task, server_times(node, config.run.num_warmup_batches))
    finally:
        node.close()
    return _exit_code(outcome)


def _write_server_trace(config: BenchConfig, node: ServerNode) -> None:
    if config.output.trace_file is None:
        return
    from lockstep.runtime.trace.task_trace import TraceWindow, trace_of, trace_path, write_trace

    # The newest steps that it saw: with --num_epochs a server does not know the number of the last step.
    records = list(node.journal)
    end = max((record.step for record in records if record.happening is Happening.COMMITTED), default=-1) + 1
    window = TraceWindow(max(0, end - config.output.trace_steps), end)
    path = trace_path(config.output.trace_file, config.task)
    try:
        write_trace(path, trace_of(config.task, (), records, node.known_plan, window))
    except OSError as error:
        say(f"the trace {path} could not be written: {error.strerror}")


def _wait_for_the_end(node: ServerNode) -> Outcome:
    try:
        node.wait_until_member()
        with spared_collector():
            return node.wait_until_ended()
    except JobEndedError as ended:
        return ended.outcome


def _run_worker(config: BenchConfig, reporter: TaskReporter, signals: TaskSignals, *, finished: bool) -> int:
    from lockstep.runtime.task.worker_node import WorkerNode

    returning = False
    while True:
        made = dataclasses.replace(node_config(config, returning=returning), finished=finished and not returning)
        node = WorkerNode(made, say, reporter)
        signals.attach(node)
        try:
            node.start()
            code = _train(config, node)
        finally:
            node.close()
        if code is not None:
            return code
        returning = True
        gc.collect()  # the model of the life that has ended has reference cycles; the next one freezes what is there


def _train(config: BenchConfig, node: WorkerNode) -> int | None:
    """Run one incarnation as a worker; returns the exit code, or None if the job restarts."""
    node.phase(TaskPhase.IMPORTING_TORCH)
    from lockstep.benchmark.data.errors import BadData, TooManyBadRecords
    from lockstep.benchmark.training.run import NoSuchDeviceError, run_worker
    from lockstep.training.parameter_watch import ParametersNotFinite

    node.phase(TaskPhase.CONNECTING if node.forming else TaskPhase.COMPARING_SETTINGS)
    output = Output()
    try:
        run_worker(config, node, output.emit, output.make_progress)
    except JobEndedError as ended:
        if ended.outcome.again:
            return None
        return EXIT_BAD_INPUT if node.refused else _exit_code(ended.outcome)
    except (NoSuchDeviceError, BadData) as error:
        say(str(error))
        return EXIT_FAILED if isinstance(error, TooManyBadRecords) else EXIT_BAD_INPUT
    except ParametersNotFinite as error:
        say(str(error))
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - run_worker reports it to the job; here a person reads it
        traceback.print_exception(error)
        say(f"{node.task} failed in step {node.machine.role.step}: {type(error).__name__}: {error}")
        return EXIT_FAILED
    finally:
        output.close()
    return 0


def _run_collective(config: BenchConfig, reporter: TaskReporter, signals: TaskSignals) -> int:
    from lockstep.runtime.task.collective_node import CollectiveNode

    # These modes keep nothing: a loss ends the run, and the next one begins anew.
    made = dataclasses.replace(node_config(config), recovery=RecoveryRules(), beginning=Beginning(), train_dir="")
    node = CollectiveNode(made, say, reporter)
    signals.attach(node)
    try:
        node.start()
        return _reduce(config, node)
    finally:
        node.close()


def _reduce(config: BenchConfig, node: CollectiveNode) -> int:
    node.phase(TaskPhase.IMPORTING_TORCH)
    from lockstep.benchmark.data.errors import BadData, TooManyBadRecords
    from lockstep.benchmark.training.run import NoSuchDeviceError, run_collective
    from lockstep.training.parameter_watch import ParametersNotFinite
    from lockstep.training.ranks.group import CollectiveLost

    node.phase(TaskPhase.CONNECTING if node.forming else TaskPhase.COMPARING_SETTINGS)
    output = Output()
    try:
        run_collective(config, node, output.emit, output.make_progress)
    except JobEndedError as ended:
        return EXIT_BAD_INPUT if node.refused else _exit_code(ended.outcome)
    except (NoSuchDeviceError, BadData) as error:
        say(str(error))
        return EXIT_FAILED if isinstance(error, TooManyBadRecords) else EXIT_BAD_INPUT
    except (CollectiveLost, InputLost, ParametersNotFinite) as error:
        say(str(error))
        return EXIT_FAILED
    finally:
        output.close()
    return 0


def run_alone(config: BenchConfig) -> int:
    """Train, or evaluate, in this process, without a cluster."""
    signals = TaskSignals(CHIEF, say, 0.0, signums=(signal.SIGUSR1,))
    signals.install()
    from lockstep.benchmark.data.errors import BadData, TooManyBadRecords
    from lockstep.benchmark.training.run import NoSuchDeviceError, run_evaluation, run_single
    from lockstep.runtime.task.lone_node import LoneNode
    from lockstep.training.parameter_watch import ParametersNotFinite

    output = Output()
    node = LoneNode(say, config.output.train_dir or "")
    if not config.evaluation.only:
        signals.attach(node)
        node.start()
    try:
        if config.evaluation.only:
            return 0 if run_evaluation(config, output.emit, output.make_progress) is not None else EXIT_FAILED
        run_single(config, output.emit, output.make_progress, node)
    except (NoSuchDeviceError, BadData) as error:
        say(str(error))
        return EXIT_FAILED if isinstance(error, TooManyBadRecords) else EXIT_BAD_INPUT
    except (InputLost, ParametersNotFinite) as error:
        say(str(error))
        return EXIT_FAILED
    finally:
        node.close()
        output.close()
    return 0


def _exit_code(outcome: Outcome) -> int:
    """The node has already reported why."""
    if outcome.ok and outcome.unsaved:
        return EXIT_FAILED
    return outcome.exit_code(EXIT_FAILED if outcome.reason.own_error else EXIT_VERDICT)
