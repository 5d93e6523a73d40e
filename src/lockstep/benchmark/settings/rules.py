"""Everything that can be wrong with a benchmark run: one function per rule, all in one table.

Pure: the rules look only at the values, never at this machine, and all are reported at once. Checks of the machine
itself (addresses, ports, folders) are in ``runtime/startup/preflight.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.benchmark.models.catalogue import SEQ2SEQ, UnknownModel, check_model_name, is_external
from lockstep.benchmark.settings.config import (
    DATA_FORMATS,
    DATA_NAMES,
    DEVICES,
    LOCAL_UPDATES,
    MEBIBYTE,
    OPTIMIZERS,
    VARIABLE_UPDATES,
    BenchConfig,
)
from lockstep.benchmark.settings.feature_rules import FEATURE_RULES
from lockstep.protocol.coordinator.recovery import LossPolicy
from lockstep.protocol.core.ids import Role
from lockstep.runtime.startup.cluster import cluster_problems

MAX_LOCAL_TASKS = 64
MAX_DEVICES = 64
MAX_BUCKET_BYTES = 1024 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule, by its name, and the sentence for the user."""

    rule: str
    sentence: str


@dataclass(frozen=True, slots=True)
class _Facts:
    config: BenchConfig
    gpus: int | None


def problems(config: BenchConfig, gpus: int | None = None) -> list[Problem]:
    """Everything that is wrong with a run: all rules, all at once.

    ``gpus`` is the number of GPUs that this machine shows; None if they were not counted.
    """
    facts = _Facts(config, gpus)
    found = [Problem(name, sentence) for name, rule in RULES.items() for sentence in rule(facts)]
    return found + [Problem(name, sentence) for name, rule in FEATURE_RULES.items() for sentence in rule(config)]


def _cluster(facts: _Facts) -> Iterator[str]:
    config = facts.config
    # With both a task and a local cluster, the one sentence about that is enough.
    if config.cluster is not None and (config.task is None or config.local is None):
        yield from cluster_problems(config.cluster)


def _replicas(facts: _Facts) -> Iterator[str]:
    config = facts.config
    if config.cluster is None or not config.cluster.server_replicas or config.exchange.is_collective:
        return
    if config.local is not None and config.local.servers == 1:
        yield "--server_replicas=1 needs a second server to hold what the first one holds; give --ps=2."
    if not config.exchange.cross_replica_sync:
        yield "--server_replicas=1 needs steps that all workers make together; leave out --cross_replica_sync=False."
    if config.cluster.on_worker_loss == LossPolicy.SHRINK.value:
        yield "--server_replicas=1 needs all workers in every step; give --on_worker_loss=wait or abort."
    if config.exchange.local_parameter_device == "gpu" and config.devices.device == "auto":
        yield (
            "--server_replicas=1 needs servers that all update on the same kind of device; give "
            "--local_parameter_device=cpu, or --device=gpu where every server has a GPU."
        )


def _local_cluster(facts: _Facts) -> Iterator[str]:
    local = facts.config.local
    if local is None:
        return
    if facts.config.task is not None:
        yield (
            "--job_name starts one task of a cluster, but --ps and --workers start a whole cluster on this machine; "
            "leave one of the two out."
        )
    elif facts.config.exchange.is_collective:
        if local.servers or local.workers < 1:
            yield (
                f"--variable_update={facts.config.exchange.variable_update} uses no servers; "
                "leave out --ps and give, for example, --workers=2."
            )
    elif local.servers < 1 or local.workers < 1:
        yield "a cluster needs at least one server and one worker; give both, for example --ps=1 --workers=2."
    elif local.servers + local.workers > MAX_LOCAL_TASKS:
        yield (
            f"--ps={local.servers} --workers={local.workers} would start {local.servers + local.workers} tasks here, "
            f"but one machine runs at most {MAX_LOCAL_TASKS}; give smaller numbers."
        )


def _model(facts: _Facts) -> Iterator[str]:
    config = facts.config
    if config.data_name not in DATA_NAMES:
        yield f"--data_name={config.data_name} is not known; use one of: {', '.join(DATA_NAMES)}."
    if config.model == SEQ2SEQ.name and config.data.is_real(config.data_name):
        yield f"--model={config.model} generates its own sequences; leave out --data_dir and --data_name."
    if config.task is not None and config.task.role is Role.SERVER and is_external(config.model):
        return  # a server has no model, so it need not have the package that holds it
    try:
        check_model_name(config.model, config.data_name)
    except UnknownModel as error:
        yield str(error)
    except (ValueError, ImportError):
        yield f"--model={config.model} names a package that cannot be found; give one that can be imported."


def _batch_size(facts: _Facts) -> Iterator[str]:
    batch = facts.config.run.batch_size
    if batch < 0:
        yield f"--batch_size={batch} is negative; give the images per device, or 0 for the model's default."


def _run_length(facts: _Facts) -> Iterator[str]:
    run = facts.config.run
    if run.num_batches < 1:
        yield f"--num_batches={run.num_batches} leaves nothing to time; give 1 or more."
    if run.num_warmup_batches < 0:
        yield f"--num_warmup_batches={run.num_warmup_batches} is negative; give 0 for no warm-up, or more."


def _variable_update(facts: _Facts) -> Iterator[str]:
    exchange = facts.config.exchange
    if exchange.variable_update not in VARIABLE_UPDATES:
        yield f"--variable_update={exchange.variable_update} is not known; use one of: {', '.join(VARIABLE_UPDATES)}."
    yield from _modes(facts.config)
    if exchange.variable_update != "distributed_replicated":
        return
    if not exchange.cross_replica_sync:
        yield (
            "--variable_update=distributed_replicated is always synchronous; "
            "leave out --cross_replica_sync=False, or use --variable_update=parameter_server."
        )
    if facts.config.cluster is None:
        yield (
            "--variable_update=distributed_replicated needs servers; add --job_name with the host lists, "
            "or --ps=1 --workers=2 for a cluster on this machine."
        )


def _modes(config: BenchConfig) -> Iterator[str]:
    """Which modes work with a cluster, and which settings with a mode."""
    exchange = config.exchange
    asked = f"--variable_update={exchange.variable_update}"
    task_is_server = config.task is not None and config.task.role is Role.SERVER
    if exchange.variable_update in LOCAL_UPDATES and config.cluster is not None:
        yield f"{asked} runs in a single process; leave out --job_name, --ps and --workers, or use another mode."
    if exchange.is_collective:
        if config.cluster is None:
            yield f"{asked} needs several workers; add --workers=2 for this machine, or --job_name with --worker_hosts."
        elif config.cluster.ps_hosts or task_is_server:
            yield f"{asked} uses no servers; leave out --ps_hosts, and start only workers."
        if not exchange.cross_replica_sync:
            yield f"{asked} is always synchronous; leave out --cross_replica_sync=False."
    if exchange.variable_consistency == "relaxed" and config.cluster is not None and not exchange.is_collective:
        yield (
            "--variable_consistency=relaxed works only in the modes without servers, because servers apply a step's "
            "gradients in that step; leave it out, or use --variable_update=collective_all_reduce."
        )
    if exchange.variable_update == "independent" and config.precision.auto_loss_scale:
        yield "--fp16_enable_auto_loss_scale does not work with --variable_update=independent; leave one of them out."
    if exchange.gradient_repacking < 0:
        yield f"--gradient_repacking={exchange.gradient_repacking} is negative; give 0 for buckets by size, or more."
    if exchange.collective_port is not None and not 1 <= exchange.collective_port <= 65535:
        yield f"--collective_port={exchange.collective_port} is not a port; give a number from 1 to 65535."


def _bucket_size(facts: _Facts) -> Iterator[str]:
    size = facts.config.exchange.bucket_bytes
    if size is not None and not 64 <= size <= MAX_BUCKET_BYTES:
        yield (
            f"--bucket_mb={size / MEBIBYTE:g} is out of range; "
            f"give a number above 0 and up to {MAX_BUCKET_BYTES // MEBIBYTE}."
        )


def _gpus(facts: _Facts) -> Iterator[str]:
    devices = facts.config.devices
    task = facts.config.task
    if task is not None and task.role is Role.SERVER:
        return  # a server uses no GPU; people give all tasks the same command line
    if devices.num_gpus < 1:
        yield f"--num_gpus={devices.num_gpus} leaves no device to train on; give 1, with --device=cpu for no GPU."
    elif devices.device == "gpu" and facts.gpus is not None and devices.num_gpus > facts.gpus:
        remedy = f"give at most --num_gpus={facts.gpus}, or --device=cpu" if facts.gpus else "give --device=cpu"
        yield (
            f"--num_gpus={devices.num_gpus} --device=gpu asks for more GPUs than the {facts.gpus} that this machine "
            f"shows (see CUDA_VISIBLE_DEVICES); {remedy}."
        )
    elif devices.num_gpus > MAX_DEVICES:
        yield f"--num_gpus={devices.num_gpus} is more than one worker supports; give at most {MAX_DEVICES}."


def _devices(facts: _Facts) -> Iterator[str]:
    devices = facts.config.devices
    if devices.device not in DEVICES:
        yield f"--device={devices.device} is not known; use one of: {', '.join(DEVICES)}."
    if devices.data_format not in DATA_FORMATS:
        yield f"--data_format={devices.data_format} is not known; use one of: {', '.join(DATA_FORMATS)}."
    if devices.num_threads is not None and devices.num_threads < 1:
        yield f"--num_threads={devices.num_threads} leaves no thread; give 1 or more, or leave it out."


def _optimizer(facts: _Facts) -> Iterator[str]:
    optimizer = facts.config.optimizer
    if optimizer.name not in OPTIMIZERS:
        yield f"--optimizer={optimizer.name} is not known; use one of: {', '.join(OPTIMIZERS)}."
    if optimizer.init_learning_rate is not None and optimizer.init_learning_rate < 0:
        yield f"--init_learning_rate={optimizer.init_learning_rate:g} is negative; give 0 or more."
    if optimizer.weight_decay < 0:
        yield f"--weight_decay={optimizer.weight_decay:g} is negative; give 0 for none, or more."
    for name in ("momentum", "rmsprop_decay", "rmsprop_momentum", "adam_beta1", "adam_beta2"):
        number = getattr(optimizer, name)
        if not 0 <= number < 1:
            yield f"--{name}={number:g} is out of range; give a number from 0 up to, but not including, 1."
    for name in ("rmsprop_epsilon", "adam_epsilon"):
        number = getattr(optimizer, name)
        if number <= 0:
            yield f"--{name}={number:g} would divide by zero; give a number above 0."


def _output(facts: _Facts) -> Iterator[str]:
    output = facts.config.output
    if output.display_every < 1:
        yield f"--display_every={output.display_every} is not a number of steps; give 1 or more."
    if output.display_perf_ewma is not None and not 0 <= output.display_perf_ewma <= 1:
        yield f"--display_perf_ewma={output.display_perf_ewma:g} is out of range; give a number from 0 to 1."


def _seed(facts: _Facts) -> Iterator[str]:
    if not 0 <= facts.config.seed < 1 << 63:
        yield f"--seed={facts.config.seed} is out of range; give a whole number from 0 to {(1 << 63) - 1}."


RULES: dict[str, Callable[[_Facts], Iterator[str]]] = {
    "cluster": _cluster,
    "local cluster": _local_cluster,
    "server replicas": _replicas,
    "model": _model,
    "batch size": _batch_size,
    "run length": _run_length,
    "variable update": _variable_update,
    "bucket size": _bucket_size,
    "GPUs": _gpus,
    "devices": _devices,
    "optimizer": _optimizer,
    "output": _output,
    "seed": _seed,
}
