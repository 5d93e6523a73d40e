"""Turns the given flags into a ``BenchConfig``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from lockstep.benchmark.settings.config import (
    COLLECTIVE_UPDATES,
    COMPILED_BUCKET_BYTES,
    MEBIBYTE,
    BenchConfig,
    DeviceConfig,
    ExchangeConfig,
    LocalCluster,
    OptimizerConfig,
    OutputConfig,
    RunLength,
)
from lockstep.benchmark.settings.features import DataConfig, EvaluationConfig, PrecisionConfig, ScheduleConfig
from lockstep.cli.flags.flag import Value
from lockstep.cli.flags.parsing import CommandLine
from lockstep.errors import BadInput
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.plan import ALIGNMENT
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.metrics_options import MetricsOptions
from lockstep.runtime.startup.pages import Pages
from lockstep.transports.verbs.options import RdmaOptions

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a command line by name, each with the type that its flag's kind promises."""

    line: CommandLine

    def text(self, name: str) -> str:
        return _typed(self.line.value(name), str)

    def optional_text(self, name: str) -> str | None:
        return None if self.line.value(name) is None else self.text(name)

    def whole(self, name: str) -> int:
        return _typed(self.line.value(name), int)

    def optional_whole(self, name: str) -> int | None:
        return None if self.line.value(name) is None else self.whole(name)

    def number(self, name: str) -> float:
        return _typed(self.line.value(name), float)

    def optional_number(self, name: str) -> float | None:
        return None if self.line.value(name) is None else self.number(name)

    def switch(self, name: str) -> bool:
        return _typed(self.line.value(name), bool)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; BadInput if one of them is not a number."""
        try:
            return tuple(float(word) for word in _typed(self.line.value(name), tuple))
        except ValueError:
            raise BadInput(
                f"--{name} contains something that is not a number; write, for example, --{name}=10,20."
            ) from None

    def hosts(self, name: str) -> tuple[str, ...]:
        return _typed(self.line.value(name), tuple)


def _typed(value: Value, kind: type[_T]) -> _T:
    assert isinstance(value, kind), f"the table promises {kind.__name__}, not {value!r}"
    return value


def build_config(line: CommandLine) -> BenchConfig:
    """The run that these flags ask for, valid or not; ``training.rules`` finds the problems."""
    values = _Values(line)
    local = _local(values)
    named = bool(values.text("job_name") or values.hosts("ps_hosts") or values.hosts("worker_hosts"))
    distributed = local is not None or named
    return BenchConfig(
        model=values.text("model"),
        data_name=values.text("data_name"),
        seed=values.whole("seed"),
        on_nan_parameters=values.text("on_nan_parameters"),
        run=RunLength(
            batch_size=values.whole("batch_size"),
            num_batches=values.whole("num_batches"),
            num_warmup_batches=values.whole("num_warmup_batches"),
            num_epochs=values.optional_number("num_epochs"),
            forward_only=values.switch("forward_only"),
        ),
        exchange=ExchangeConfig(
            variable_update=values.text("variable_update"),
            cross_replica_sync=values.switch("cross_replica_sync"),
            local_parameter_device=values.text("local_parameter_device"),
            wire_dtype=values.text("wire_dtype"),
            variable_consistency=values.text("variable_consistency"),
            all_reduce_spec=values.text("all_reduce_spec") or None,
            gradient_repacking=values.whole("gradient_repacking"),
            collective_port=values.optional_whole("collective_port"),
            bucket_bytes=_bucket_bytes(values),
        ),
        devices=DeviceConfig(
            device=values.text("device"),
            num_gpus=values.whole("num_gpus"),
            data_format=values.text("data_format"),
            num_threads=values.optional_whole("num_threads"),
            deterministic=values.switch("deterministic"),
            compile=values.switch("compile"),
            mps=values.switch("mps"),
        ),
        optimizer=_optimizer(values),
        output=OutputConfig(
            display_every=values.whole("display_every"),
            display_perf_ewma=values.optional_number("display_perf_ewma"),
            train_dir=values.optional_text("train_dir"),
            save_model_secs=values.whole("save_model_secs"),
            save_model_steps=values.optional_whole("save_model_steps"),
            max_ckpts_to_keep=values.whole("max_ckpts_to_keep"),
            from_scratch=values.switch("from_scratch"),
            print_training_accuracy=values.switch("print_training_accuracy"),
            loss_type=values.text("loss_type_to_report"),
            benchmark_log_dir=values.optional_text("benchmark_log_dir"),
            benchmark_test_id=values.optional_text("benchmark_test_id"),
            summary_verbosity=values.whole("summary_verbosity"),
            save_summaries_steps=values.whole("save_summaries_steps"),
            trace_file=values.text("trace_file") or None,
            trace_steps=values.whole("trace_steps"),
            graph_file=values.optional_text("graph_file"),
            timing_dir=values.optional_text("timing_dir"),
            verbose=values.switch("verbose"),
            notices=tuple(line.notices()),
        ),
        data=_data(values),
        evaluation=_evaluation(values),
        precision=PrecisionConfig(
            use_fp16=values.switch("use_fp16"),
            use_bf16=values.switch("use_bf16"),
            loss_scale=values.optional_number("fp16_loss_scale"),
            auto_loss_scale=values.switch("fp16_enable_auto_loss_scale"),
            raise_every=values.whole("fp16_inc_loss_scale_every_n"),
        ),
        schedule=ScheduleConfig(
            piecewise=values.optional_text("piecewise_learning_rate_schedule"),
            num_epochs_per_decay=values.number("num_epochs_per_decay"),
            decay_factor=values.number("learning_rate_decay_factor"),
            minimum=values.number("minimum_learning_rate"),
            warmup_epochs=values.number("num_learning_rate_warmup_epochs"),
            resnet_base_lr=values.optional_number("resnet_base_lr"),
        ),
        cluster=_cluster(values) if distributed else None,
        local=local,
    )


def _local(values: _Values) -> LocalCluster | None:
    servers, workers = values.optional_whole("ps"), values.optional_whole("workers")
    if servers is None and workers is None:
        return None
    return LocalCluster(servers=servers or 0, workers=workers or 0)


def _cluster(values: _Values) -> ClusterSpec:
    job_name = values.text("job_name")
    return ClusterSpec(
        ps_hosts=values.hosts("ps_hosts"),
        worker_hosts=values.hosts("worker_hosts"),
        task=TaskId(Role(job_name), values.whole("task_index")) if job_name else None,
        protocol=values.text("server_protocol"),
        bind=values.optional_text("bind"),
        ports=values.optional_text("ports"),
        require_private=values.switch("require_private"),
        startup_timeout=values.number("startup_timeout"),
        stall_after=values.number("stall_after"),
        user_code_timeout=values.number("user_code_timeout"),
        rejoin_timeout=values.number("rejoin_timeout"),
        grace=values.number("grace"),
        on_stall=values.text("on_stall"),
        pages=Pages(values.optional_text("on_verdict") or "", values.optional_text("verdict_webhook") or ""),
        metrics=MetricsOptions(values.optional_text("metrics_port") or "", values.optional_text("metrics_file") or ""),
        on_worker_loss=values.text("on_worker_loss"),
        server_replicas=values.whole("server_replicas"),
        restarts=values.whole("restarts"),
        spares=values.whole("spares"),
        has_servers=values.text("variable_update") not in COLLECTIVE_UPDATES,
        carried_by_torch=values.text("variable_update") in COLLECTIVE_UPDATES,
        rdma=rdma_options({name: values.line.value(name) for name in RDMA_FLAGS}),
    )


RDMA_FLAGS = tuple(f"rdma_{field.name}" for field in dataclasses.fields(RdmaOptions))


def rdma_options(values: Mapping[str, Value]) -> RdmaOptions:
    """The values of the RDMA flags; those that are missing or None were not given."""
    given = {name.removeprefix("rdma_"): values.get(name) for name in RDMA_FLAGS}
    return RdmaOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _optimizer(values: _Values) -> OptimizerConfig:
    return OptimizerConfig(
        name=values.text("optimizer"),
        init_learning_rate=values.optional_number("init_learning_rate"),
        momentum=values.number("momentum"),
        rmsprop_decay=values.number("rmsprop_decay"),
        rmsprop_momentum=values.number("rmsprop_momentum"),
        rmsprop_epsilon=values.number("rmsprop_epsilon"),
        adam_beta1=values.number("adam_beta1"),
        adam_beta2=values.number("adam_beta2"),
        adam_epsilon=values.number("adam_epsilon"),
        weight_decay=values.number("weight_decay"),
        gradient_clip=values.optional_number("gradient_clip"),
    )


def _data(values: _Values) -> DataConfig:
    return DataConfig(
        folder=values.optional_text("data_dir"),
        distortions=values.switch("distortions"),
        resize_method=values.text("resize_method"),
        ml_perf=values.switch("ml_perf"),
        repeat_sample=values.switch("datasets_repeat_cached_sample"),
        processes=values.optional_whole("datasets_num_private_threads"),
        prefetch=values.whole("datasets_prefetch_buffer_size") if values.switch("datasets_use_prefetch") else 1,
        max_bad_records=values.whole("max_bad_records"),
    )


_MOST_BYTES = 1 << 62
"""More than any memory; a float may be far larger, or infinite."""


def _bucket_bytes(values: _Values) -> int | None:
    """Rounded to the plan's alignment, which a fraction of a MiB seldom matches; too small a size stays as it is."""
    mebibytes = values.optional_number("bucket_mb")
    if mebibytes is None:
        return COMPILED_BUCKET_BYTES if values.switch("compile") else None
    asked = round(max(-_MOST_BYTES, min(_MOST_BYTES, mebibytes * MEBIBYTE)))
    return asked // ALIGNMENT * ALIGNMENT or asked


def _evaluation(values: _Values) -> EvaluationConfig:
    return EvaluationConfig(
        only=values.switch("eval"),
        interval_secs=values.whole("eval_interval_secs"),
        every_n_steps=values.optional_whole("eval_during_training_every_n_steps"),
        every_n_epochs=values.optional_number("eval_during_training_every_n_epochs"),
        at_steps=tuple(int(number) for number in values.numbers("eval_during_training_at_specified_steps")),
        at_epochs=values.numbers("eval_during_training_at_specified_epochs"),
        batch_size=values.whole("eval_batch_size"),
        num_batches=values.optional_whole("num_eval_batches"),
        num_epochs=values.optional_number("num_eval_epochs"),
        stop_at_top_1=values.optional_number("stop_at_top_1_accuracy"),
        folder=values.optional_text("eval_dir"),
    )
