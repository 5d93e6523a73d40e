"""What a benchmark run is, as plain data: torch-free, so that the monitor can check it before torch is imported.

``settings`` lists what must be equal on every task; the coordinator compares it when a task joins. What can be
wrong with a run is in ``benchmark/settings/rules.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.benchmark.data.names import NAMES
from lockstep.benchmark.models.catalogue import IMAGENET, find_entry, is_external, known_dataset
from lockstep.benchmark.settings.features import DataConfig, EvaluationConfig, PrecisionConfig, ScheduleConfig
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.endings import ON_NAN_PARAMETERS
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Setting
from lockstep.protocol.core.setting_names import LOCKSTEP_VERSION, SEED, SERVER_DEVICE, SERVERS, TORCH_VERSION, WORKERS
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.version import __version__, torch_version

DTYPE = "float32"
"""The type of parameters and gradients."""

WIRE_DTYPES = (DTYPE, "bfloat16", "float16")

COLLECTIVE_UPDATES = ("collective_all_reduce", "distributed_all_reduce")
LOCAL_UPDATES = ("replicated", "independent")
VARIABLE_UPDATES = ("parameter_server", "distributed_replicated", *LOCAL_UPDATES, *COLLECTIVE_UPDATES)
DEVICES = ("auto", "cpu", "gpu")
DATA_FORMATS = ("NCHW", "NHWC")
MEBIBYTE = 1 << 20
COMPILED_BUCKET_BYTES = 128 * MEBIBYTE
"""With ``--compile`` all gradients of a stage come at once, so smaller buckets have no advantage."""
DATA_NAMES = NAMES

OptionValue = float | bool | tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCluster:
    """A whole cluster on this machine."""

    servers: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """How much is trained. ``batch_size`` is per device; 0 asks for the model's default."""

    batch_size: int = 0
    num_batches: int = 100
    num_warmup_batches: int = 10
    num_epochs: float | None = None
    """If given, it replaces ``num_batches``, which is then set once the data set is open."""
    forward_only: bool = False

    @property
    def steps(self) -> int:
        """All steps of the run, warm-up included."""
        return self.num_warmup_batches + self.num_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeConfig:
    """How gradients and parameters are exchanged between workers and servers."""

    variable_update: str = "parameter_server"
    cross_replica_sync: bool = True
    local_parameter_device: str = "gpu"
    bucket_bytes: int | None = None
    """None: chosen for the model and the cluster (``fitting_bucket_bytes``)."""
    wire_dtype: str = DTYPE
    """The type in which gradients are sent to a server."""
    variable_consistency: str = "strong"
    all_reduce_spec: str | None = None
    gradient_repacking: int = 0
    collective_port: int | None = None
    """Where worker 0 listens for the others in the modes without servers; None: see ``store_port``."""

    @property
    def is_collective(self) -> bool:
        """Whether workers reduce gradients among themselves, without servers."""
        return self.variable_update in COLLECTIVE_UPDATES


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """Where the arithmetic happens. ``auto`` is a GPU if the task finds one, else the CPU."""

    device: str = "auto"
    num_gpus: int = 1
    data_format: str = "NCHW"
    num_threads: int | None = None
    deterministic: bool = False
    compile: bool = False
    mps: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The numbers of ``--optimizer`` and its rates, and the torch.optim class that they mean.

    ``init_learning_rate`` None asks for the model's own rate. ``weight_decay`` is separate from ``options``, because
    it applies to some parameters only (not to those of batch-norm).
    """

    name: str = "sgd"
    init_learning_rate: float | None = None
    momentum: float = 0.9
    rmsprop_decay: float = 0.9
    rmsprop_momentum: float = 0.9
    rmsprop_epsilon: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 4e-5
    gradient_clip: float | None = None

    @property
    def kind(self) -> str:
        """Name of the class in torch.optim; KeyError for an unknown optimizer."""
        return _TORCH_OPTIMIZERS[self.name][0]

    def options(self) -> dict[str, OptionValue]:
        """Arguments of that class by name, without the learning rate and the weight decay."""
        return _TORCH_OPTIMIZERS[self.name][1](self)


def _momentum_options(config: OptimizerConfig) -> dict[str, OptionValue]:
    # torch refuses Nesterov without momentum, although that is just plain SGD.
    return {"momentum": config.momentum, "nesterov": config.momentum > 0}


def _rmsprop_options(config: OptimizerConfig) -> dict[str, OptionValue]:
    return {"alpha": config.rmsprop_decay, "momentum": config.rmsprop_momentum, "eps": config.rmsprop_epsilon}


def _adam_options(config: OptimizerConfig) -> dict[str, OptionValue]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


_TORCH_OPTIMIZERS: dict[str, tuple[str, Callable[[OptimizerConfig], dict[str, OptionValue]]]] = {
    "sgd": ("SGD", lambda _config: {}),
    "momentum": ("SGD", _momentum_options),
    "rmsprop": ("RMSprop", _rmsprop_options),
    "adam": ("Adam", _adam_options),
    "adamw": ("AdamW", _adam_options),
}

OPTIMIZERS = tuple(_TORCH_OPTIMIZERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """What the run prints and leaves behind. ``notices`` are sentences about flags that do nothing here."""

    display_every: int = 10
    display_perf_ewma: float | None = None
    train_dir: str | None = None
    save_model_secs: int = 0
    save_model_steps: int | None = None
    max_ckpts_to_keep: int = 5
    from_scratch: bool = False
    print_training_accuracy: bool = False
    loss_type: str = "total_loss"
    benchmark_log_dir: str | None = None
    benchmark_test_id: str | None = None
    summary_verbosity: int = 0
    save_summaries_steps: int = 0
    trace_file: str | None = None
    trace_steps: int = 10
    graph_file: str | None = None
    timing_dir: str | None = None
    verbose: bool = False
    notices: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """One run of the benchmark as one process sees it.

    Without ``cluster`` it is a single process without distribution. With ``local`` it starts a whole cluster on this
    machine; ``cluster`` then has the settings but no hosts and no task yet.
    """

    model: str = "trivial"
    data_name: str = IMAGENET
    seed: int = 1234
    on_nan_parameters: str = ON_NAN_PARAMETERS[0]
    run: RunLength = field(default_factory=RunLength)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    cluster: ClusterSpec | None = None
    local: LocalCluster | None = None

    @property
    def task(self) -> TaskId | None:
        """Which task of a cluster this process is; None for a single process and for the start of a local cluster."""
        return self.cluster.task if self.cluster is not None else None

    @property
    def num_workers(self) -> int:
        """Workers of the whole run; 1 for a single process."""
        if self.local is not None:
            return self.local.workers
        return len(self.cluster.worker_hosts) if self.cluster is not None else 1


def resolved(config: BenchConfig) -> BenchConfig:
    """The same run with the model's default batch size filled in if none was given. The model must be known.

    A model from another package keeps 0: its default is known only once the task has imported that package.
    """
    if config.run.batch_size or is_external(config.model):
        return config
    batch = find_entry(config.model, config.data_name).default_batch_size
    return dataclasses.replace(config, run=dataclasses.replace(config.run, batch_size=batch))


def _bucket_setting(nbytes: int | None, cluster: ClusterSpec) -> str:
    if nbytes is not None:
        return f"{nbytes / MEBIBYTE!r}"
    return "as fits one host" if cluster.shares_memory else "as fits a network"


def store_port(config: BenchConfig) -> int:
    """Where worker 0 keeps the store of a mode without servers: as given, the last of --ports, or the first after its
    own that the lists give to nobody."""
    cluster = config.cluster
    if config.exchange.collective_port is not None or cluster is None or not cluster.worker_hosts:
        return config.exchange.collective_port or 0
    if cluster.second_ports is not None:
        return cluster.second_ports.agreed
    listed = [int(address.rpartition(":")[2]) for address in cluster.worker_hosts]
    return next(port for port in range(listed[0] + 1, listed[0] + 2 + len(listed)) if port not in listed)


def settings(config: BenchConfig) -> tuple[Setting, ...]:
    """What must be equal on all tasks, servers included, by flag name where there is a flag.

    What may differ is left out on purpose: devices and their number (a server has none), folders, and the
    spelling of the addresses (a wrong order shows when the tasks meet). The seed must be equal on all workers: it
    decides the order of the samples, and with two orders the workers' shares of an epoch overlap.
    """
    config = resolved(config)
    cluster = config.cluster or ClusterSpec()
    optimizer = config.optimizer
    rate = optimizer.init_learning_rate
    values: dict[str, object] = {
        LOCKSTEP_VERSION: __version__,
        TORCH_VERSION: torch_version(),
        SERVERS: cluster.shape.servers,
        WORKERS: cluster.shape.workers,
        "server_protocol": cluster.protocol,
        "model": config.model,
        "data_name": known_dataset(config.data_name),
        "dtype": DTYPE,
        "wire_dtype": config.exchange.wire_dtype,
        "compile": config.devices.compile,
        "batch_size": config.run.batch_size or "the model's own",
        "num_batches": config.run.num_batches if config.run.num_epochs is None else "by --num_epochs",
        "num_epochs": "by --num_batches" if config.run.num_epochs is None else repr(config.run.num_epochs),
        SEED: config.seed,
        "num_warmup_batches": config.run.num_warmup_batches,
        "variable_update": config.exchange.variable_update,
        "cross_replica_sync": config.exchange.cross_replica_sync,
        "bucket_mb": _bucket_setting(config.exchange.bucket_bytes, cluster),
        "optimizer": f"{optimizer.name} {json.dumps(optimizer.options(), sort_keys=True)}",
        "init_learning_rate": "the model's own" if rate is None else repr(rate),
        "weight_decay": repr(optimizer.weight_decay),
        "gradient_clip": repr(optimizer.gradient_clip),
        "on_worker_loss": cluster.on_worker_loss,
        "server_replicas": cluster.server_replicas,
        "learning-rate schedule": str(config.schedule),
        "precision": str(config.precision),
    }
    if cluster.server_replicas and cluster.task in cluster.shape.server_ids():
        values[SERVER_DEVICE] = server_device(config)
    return tuple(Setting(name, str(value)) for name, value in values.items())


def server_device(config: BenchConfig) -> str:
    """Where servers update, if they have it: cpu or gpu."""
    return "cpu" if config.devices.device == "cpu" else config.exchange.local_parameter_device


def recovery_rules(config: BenchConfig) -> RecoveryRules:
    """What this run does about lost tasks and checkpoints. Without common steps there is nothing to go back to."""
    cluster, output = config.cluster or ClusterSpec(), config.output
    if not config.exchange.cross_replica_sync:
        return RecoveryRules(rejoin_seconds=cluster.rejoin_timeout, grace_seconds=cluster.grace)
    return RecoveryRules(
        on_worker_loss=LossPolicy(cluster.on_worker_loss),
        rejoin_seconds=cluster.rejoin_timeout,
        grace_seconds=cluster.grace,
        returns=output.train_dir is not None,
        server_replicas=cluster.server_replicas,
        save_steps=output.save_model_steps or 0,
        save_seconds=float(output.save_model_secs),
        saves_last=output.train_dir is not None,
    )
