"""A benchmark worker, or a single process, from start to end."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import torch

from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.models.catalogue import TOKENS
from lockstep.benchmark.outputs import times
from lockstep.benchmark.outputs.metrics import Banner, banner_lines, epochs_of
from lockstep.benchmark.outputs.observers import Observers
from lockstep.benchmark.outputs.outputs import evaluation_events, observers_of
from lockstep.benchmark.settings.config import BenchConfig, server_device
from lockstep.benchmark.training.collective import CollectiveUpdates, meeting_of
from lockstep.benchmark.training.evaluation import Evaluated, Evaluation, evaluate_once, shows_nothing
from lockstep.benchmark.training.job import BenchJob, JobCallbacks
from lockstep.benchmark.training.loop import BenchResult, Emit, Progress, train
from lockstep.benchmark.training.updates import LocalUpdates, NoUpdates, Updates, WatchedUpdates
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import CHIEF, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.lone_node import LoneNode
from lockstep.runtime.task.node import Node
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.bucket_size import fitting_bucket_bytes
from lockstep.training.export import write_final_parameters
from lockstep.training.kept_memory import keep_freed_memory
from lockstep.training.parameter_watch import ParametersNotFinite
from lockstep.training.ranks.group import CollectiveLost, WorkerGroup
from lockstep.training.server.piece_pool import fitting_helpers
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.replica import Replica
from lockstep.version import __version__

MakeProgress = Callable[[], Progress]


class NoSuchDeviceError(Exception):
    """The requested device is not available; the text says what to do."""


def choose_devices(config: BenchConfig) -> list[torch.device]:
    """The devices of a worker, as requested, or an error; ``auto`` takes GPUs if there are any."""
    asked, count = config.devices.device, config.devices.num_gpus
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "gpu" and not found:
        raise NoSuchDeviceError("--device=gpu was asked for, but torch sees no GPU; use --device=cpu")
    if asked == "cpu" or not found:
        return [torch.device("cpu")] * count
    if count > found:
        raise NoSuchDeviceError(
            f"--num_gpus={count} was asked for, but torch sees {found} GPU(s); give a smaller number"
        )
    return [torch.device("cuda", index) for index in range(count)]


def choose_device(config: BenchConfig) -> torch.device:
    """The first of a worker's devices."""
    return choose_devices(config)[0]


def set_up_torch(config: BenchConfig, *, keeps_memory: bool = True) -> None:
    """Threads, memory and determinism, before anything is computed."""
    if keeps_memory:
        keep_freed_memory()
    if config.devices.num_threads:
        torch.set_num_threads(config.devices.num_threads)
    if config.devices.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    else:
        torch.backends.cudnn.benchmark = True
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what an earlier incarnation of this task in this process had


def server_store(config: BenchConfig) -> TorchShardStore:
    """Where a server reduces and updates: on its CPU, or on a GPU if it has one and that was requested."""
    set_up_torch(config)
    asked, cluster = server_device(config) == "gpu", config.cluster or ClusterSpec()
    device = torch.device("cuda", 0) if asked and torch.cuda.is_available() else None
    wire, alone = WireFormat(config.exchange.wire_dtype), not cluster.server_replicas
    return TorchShardStore(device, wire, fitting_helpers(cluster), stays_on_gpu=alone)


def _fitting_bucket_bytes(job: BenchJob, cluster: ClusterSpec) -> int:
    model_bytes = sum(one.parameter.nbytes for one in job.trained)
    return fitting_bucket_bytes(model_bytes, cluster.shape.servers, shares_memory=cluster.shares_memory, eager=True)


def run_worker(config: BenchConfig, node: WorkerNode, emit: Emit, make_progress: MakeProgress) -> BenchResult:
    """Train as one worker of a cluster. JobEndedError carries the reason if the job failed."""
    set_up_torch(config)
    with contextlib.ExitStack() as closing:
        closing.callback(node.close)
        with _told_to_all(node):
            return _work(config, node, emit, make_progress, closing)


@contextlib.contextmanager
def _told_to_all(node: Node) -> Iterator[None]:
    """If this worker cannot continue, the others learn at once why."""
    try:
        yield
    except JobEndedError:
        raise
    except (BadData, CollectiveLost, ParametersNotFinite) as error:
        node.fail(own_error(str(error)))
        raise
    except Exception as error:
        node.fail(failure_of(error, memory_errors=(torch.OutOfMemoryError,)))
        raise


def _work(
    config: BenchConfig, node: WorkerNode, emit: Emit, make_progress: MakeProgress, closing: contextlib.ExitStack
) -> BenchResult:
    around = JobCallbacks(
        on_wait=node.main.wait_for_input,
        on_replica=lambda number: node.main.enter(Doing.COMPUTING, f"replica {number}"),
        during=lambda what: node.main.during(Doing.BUSY, what),
        on_batch=node.main.took,
        say=emit,
    )
    job = BenchJob(config, node.task.index, choose_devices(config), around)
    closing.callback(job.close)
    print_banner(job, emit)
    node.wait_until_member()
    job.begin_at(max(0, node.start_step), node.local_state)
    if job.first_step:
        emit(f"Resuming at step {job.first_step}")
    own_copy = config.exchange.variable_update == "distributed_replicated"
    # Gradients that are modified before they are sent must pass through the parameters' own .grad.
    model = job.model if job.leaves_gradients_alone else None
    replica = Replica(
        node,
        job.trained,
        job.optimizers(),
        config.exchange.bucket_bytes or _fitting_bucket_bytes(job, node.config.cluster),
        own_copy=own_copy,
        model=model,
        wire=WireFormat(config.exchange.wire_dtype),
        local_state=job.local_state.begin_taking,
        layers=job.model if job.waits_by_layer else None,
    )
    with contextlib.closing(replica), contextlib.closing(observers_of(job, node)) as observers:
        result = train(job, replica, emit, make_progress(), observers)
        _tell_times(config, node, result, replica, emit)
    if node.task == CHIEF and config.output.train_dir is not None:
        emit(f"Wrote {write_final_parameters(job.model, config.output.train_dir)}")
    node.finish(job.config.run.steps)
    return result


def _tell_times(config: BenchConfig, node: WorkerNode, result: BenchResult, replica: Replica, emit: Emit) -> None:
    first = config.run.num_warmup_batches
    if config.output.verbose:
        for line in times.lines(node, replica, first):
            emit(line)
    if config.output.timing_dir is not None:
        told = times.worker_times(node, result, replica, first)
        times.write_times(config.output.timing_dir, node.task, told)


def _callbacks(node: CollectiveNode | LoneNode, emit: Emit) -> JobCallbacks:
    return JobCallbacks(
        on_wait=node.waits_for_input,
        on_replica=node.computes_on,
        during=lambda what: node.main.during(Doing.BUSY, what),
        on_batch=node.main.took,
        say=emit,
    )


def run_single(
    config: BenchConfig, emit: Emit, make_progress: MakeProgress, node: LoneNode | None = None
) -> BenchResult:
    """Train in this single process. ``node``, if there is one, watches over it."""
    set_up_torch(config)
    with contextlib.ExitStack() as closing:
        around = JobCallbacks(say=emit)
        if node is not None:
            around = _callbacks(node, emit)
        job = BenchJob(config, 0, choose_devices(config), around)
        closing.callback(job.close)
        print_banner(job, emit)
        observers: Observers = closing.enter_context(contextlib.closing(observers_of(job, None)))
        updates = single_updates(job)
        if node is not None:
            updates = WatchedUpdates(updates, node)
        result = train(job, updates, emit, make_progress(), observers)
        if config.output.train_dir is not None and not config.run.forward_only:
            emit(f"Wrote {write_final_parameters(job.model, config.output.train_dir)}")
        return result


def single_updates(job: BenchJob) -> Updates:
    """What applies gradients if there is no cluster."""
    if job.config.run.forward_only:
        return NoUpdates()
    return LocalUpdates(job, deferred=job.config.exchange.variable_consistency == "relaxed")


def run_collective(config: BenchConfig, node: CollectiveNode, emit: Emit, make_progress: MakeProgress) -> BenchResult:
    """Train as one of several workers that reduce among themselves. JobEndedError says why it could not continue."""
    set_up_torch(config)
    assert config.task is not None
    with contextlib.ExitStack() as closing, _told_to_all(node):
        devices = choose_devices(config)
        job = BenchJob(config, config.task.index, devices, _callbacks(node, emit))
        closing.callback(job.close)
        print_banner(job, emit)
        node.wait_until_member()
        group = WorkerGroup(meeting_of(config, devices[0]), node)
        deferred = config.exchange.variable_consistency == "relaxed"
        updates = closing.enter_context(contextlib.closing(CollectiveUpdates(job, group, deferred=deferred)))
        observers: Observers = closing.enter_context(contextlib.closing(observers_of(job, node)))
        result = train(job, updates, emit, make_progress(), observers)
        if config.task == CHIEF and config.output.train_dir is not None:
            emit(f"Wrote {write_final_parameters(job.model, config.output.train_dir)}")
        updates.leave(config.run.steps)
        return result


def run_evaluation(config: BenchConfig, emit: Emit, make_progress: MakeProgress | None = None) -> Evaluated | None:
    """Evaluate what a training run left in ``train_dir``: once, or repeatedly until stopped."""
    set_up_torch(config)
    device = choose_devices(config)[0]
    assert config.output.train_dir is not None
    evaluation = Evaluation(config, device, torch.contiguous_format)
    model = evaluation.spec.build(evaluation.data.classes).to(device)
    on_batch = shows_nothing if make_progress is None else make_progress().evaluation
    with contextlib.closing(Observers(evaluation_events(config))) as observers:
        for number in itertools.count():
            result = evaluate_once(evaluation, model, config.output.train_dir, emit, on_batch)
            if result is not None:
                observers.evaluated(number, result)
            if not config.evaluation.interval_secs:
                return result
            threading.Event().wait(config.evaluation.interval_secs)
    raise AssertionError("unreachable: the loop has no end")


def print_banner(job: BenchJob, emit: Emit) -> None:
    """The lines that anyone who compares runs looks for."""
    config = job.config
    task = config.task
    mode = "forward only" if config.run.forward_only else "training"
    banner = Banner(
        version=__version__,
        model=config.model,
        dataset=config.data_name if job.spec.make_batch is None else TOKENS,
        synthetic=job.data.source is None,
        mode="training + evaluation" if config.evaluation.during_training else mode,
        global_batch=job.global_batch,
        device_batch=job.batch_size,
        num_batches=config.run.num_batches,
        num_epochs=epochs_of(config.run.num_batches, job.global_batch, job.images_per_epoch),
        devices=[device_name(task, device, number) for number, device in enumerate(job.towers.devices)],
        data_format=config.devices.data_format,
        optimizer=config.optimizer.name,
        variable_update=config.exchange.variable_update,
        all_reduce_spec=config.exchange.all_reduce_spec,
        cross_replica_sync=config.exchange.cross_replica_sync if task is not None else None,
    )
    for line in banner_lines(banner):
        emit(line)
    emit("Generating training model")
    emit("Initializing graph")


def device_name(task: TaskId | None, device: torch.device, number: int = 0) -> str:
    """``/job:worker/replica:0/task:0/gpu:0`` in a cluster, ``/gpu:0`` alone; CPU replicas are counted."""
    kind = "gpu" if device.type == "cuda" else "cpu"
    return f"{task or ''}/{kind}:{number}"
