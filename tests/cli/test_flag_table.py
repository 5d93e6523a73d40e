"""The table accounts for every flag of tf_cnn_benchmarks, and each row does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.flags import BadInput, parse_bench
from lockstep.cli.flags.flag import TITLES, Flag, FlagKind, Group, Status
from lockstep.cli.flags.table import EXCLUSIVE, TABLE
from lockstep.cli.flags.values import read_value


def _words(text: str) -> list[str]:
    return text.split()


UPSTREAM = _words("""
    agg_small_grads_max_bytes agg_small_grads_max_group all_reduce_spec allow_growth allreduce_merge_scope
    autotune_threshold backbone_model_path batch_group_size batch_size batchnorm_persistent benchmark_log_dir
    benchmark_test_id collect_eval_results_async compact_gradient_transfer compute_lr_on_cpu controller_host
    cross_replica_sync data_dir data_format data_name datasets_num_private_threads
    datasets_parallel_interleave_cycle_length datasets_parallel_interleave_prefetch datasets_prefetch_buffer_size
    datasets_repeat_cached_sample datasets_sloppy_parallel_interleave datasets_use_caching datasets_use_prefetch
    debugger device display_every display_perf_ewma distort_color_in_yiq distortions enable_optimizations eval
    eval_batch_size eval_dir eval_during_training_at_specified_epochs eval_during_training_at_specified_steps
    eval_during_training_every_n_epochs eval_during_training_every_n_steps eval_interval_secs force_gpu_compatible
    forward_only fp16_enable_auto_loss_scale fp16_inc_loss_scale_every_n fp16_loss_scale fp16_vars
    freeze_when_forward_only fuse_decode_and_crop gpu_indices gpu_kt_max_bytes gpu_kt_max_interval gpu_kt_max_pending
    gpu_memory_frac_for_testing gpu_thread_mode gradient_clip gradient_repacking graph_file hierarchical_copy
    horovod_device init_learning_rate input_preprocessor job_name kmp_affinity kmp_blocktime kmp_settings
    learning_rate_decay_factor local_parameter_device loss_type_to_report max_ckpts_to_keep minimum_learning_rate mkl
    ml_perf ml_perf_compliance_logging model momentum multi_device_iterator_max_buffer_size network_topology
    num_batches num_epochs num_epochs_per_decay num_eval_batches num_eval_epochs num_gpus num_inter_threads
    num_intra_threads num_learning_rate_warmup_epochs num_warmup_batches optimizer partitioned_graph_file_prefix
    per_gpu_thread_count piecewise_learning_rate_schedule print_training_accuracy ps_hosts resize_method
    resnet_base_lr rewriter_config rmsprop_decay rmsprop_epsilon rmsprop_momentum save_model_secs save_model_steps
    save_summaries_steps server_protocol single_l2_loss_op sparse_to_dense_grads staged_vars stop_at_top_1_accuracy
    summary_verbosity sync_on_finish task_index tf_random_seed tfprof_file timestamped_allocator trace_file train_dir
    trt_max_workspace_size_bytes trt_mode use_chrome_trace_format use_datasets use_fp16 use_numa_affinity
    use_python32_barrier use_resource_vars use_tf_layers use_unified_memory variable_consistency variable_update
    weight_decay winograd_nonfused worker_hosts xla xla_compile adam_beta1 adam_beta2 adam_epsilon
""")
"""All flags of the newest release."""

OLDER = _words("cache_data enable_layout_optimizer learning_rate pretrain_dir result_storage use_nccl")

OURS = _words("""
    bind bucket_mb collective_port compile deterministic from_scratch grace insecure job_token
    key_file max_bad_records metrics_file metrics_port mps num_threads on_nan_parameters on_stall on_verdict
    on_worker_loss ports ps rdma_device rdma_gid_index rdma_gpudirect rdma_retry_count rdma_service_level rdma_timeout
    rdma_traffic_class rejoin_timeout require_private restarts seed server_replicas spares stall_after startup_timeout
    timing_dir trace_steps use_bf16 user_code_timeout verbose verdict_webhook wire_dtype workers
""")

WORKING = _words("""
    adam_beta1 adam_beta2 adam_epsilon all_reduce_spec batch_size benchmark_log_dir benchmark_test_id
    cross_replica_sync data_dir data_format data_name datasets_num_private_threads datasets_prefetch_buffer_size
    datasets_repeat_cached_sample datasets_use_prefetch device display_every display_perf_ewma distortions eval
    eval_batch_size eval_dir eval_during_training_at_specified_epochs eval_during_training_at_specified_steps
    eval_during_training_every_n_epochs eval_during_training_every_n_steps eval_interval_secs forward_only
    fp16_enable_auto_loss_scale fp16_inc_loss_scale_every_n fp16_loss_scale gradient_clip gradient_repacking graph_file
    init_learning_rate job_name learning_rate_decay_factor local_parameter_device loss_type_to_report max_ckpts_to_keep
    minimum_learning_rate ml_perf model momentum num_batches num_epochs num_epochs_per_decay num_eval_batches
    num_eval_epochs num_gpus num_intra_threads num_learning_rate_warmup_epochs num_warmup_batches optimizer
    piecewise_learning_rate_schedule print_training_accuracy ps_hosts resize_method resnet_base_lr rmsprop_decay
    rmsprop_epsilon rmsprop_momentum save_model_secs save_model_steps save_summaries_steps server_protocol
    stop_at_top_1_accuracy summary_verbosity task_index tf_random_seed trace_file train_dir use_fp16
    variable_consistency variable_update weight_decay worker_hosts
""")

BY_NAME = {flag.name: flag for flag in TABLE}

CLUSTER = _words("--job_name=worker --ps_hosts=10.0.0.1:1 --worker_hosts=10.0.0.1:2,10.0.0.1:3")
REPLICATED = _words("--job_name=worker --ps_hosts=10.0.0.1:1,10.0.0.1:4 --worker_hosts=10.0.0.1:2 --device=cpu")

DECAY = _words("--init_learning_rate=1 --learning_rate_decay_factor=0.25")
EVALUATED = _words("--data_name=digits --eval_during_training_every_n_steps=2")
COLLECTIVE = _words("--workers=2 --variable_update=collective_all_reduce")

EFFECTS: dict[str, list[str]] = {
    "job_name": [*CLUSTER[1:], "--job_name=ps"],
    "task_index": [*CLUSTER, "--task_index=1"],
    "ps_hosts": [CLUSTER[0], CLUSTER[2], "--ps_hosts=10.0.0.1:9"],
    "worker_hosts": [*CLUSTER[:2], "--worker_hosts=10.0.0.1:9"],
    "bind": [*CLUSTER, "--bind=0.0.0.0"],
    "ports": [*CLUSTER, "--ports=4700-4799"],
    "require_private": [*CLUSTER, "--require_private"],
    "ps": ["--ps=2", "--workers=1"],
    "workers": ["--ps=1", "--workers=3"],
    "startup_timeout": [*CLUSTER, "--startup_timeout=5"],
    "stall_after": [*CLUSTER, "--stall_after=5"],
    "user_code_timeout": [*CLUSTER, "--user_code_timeout=5"],
    "rejoin_timeout": [*CLUSTER, "--rejoin_timeout=5"],
    "grace": [*CLUSTER, "--grace=5"],
    "on_worker_loss": [*CLUSTER, "--on_worker_loss=shrink"],
    "restarts": [*CLUSTER, "--restarts=5"],
    "spares": [*CLUSTER, "--restarts=5", "--spares=1"],
    "server_replicas": [*REPLICATED, "--server_replicas=1"],
    "rdma_device": [*CLUSTER, "--rdma_device=mlx5_0:1"],
    "rdma_gid_index": [*CLUSTER, "--rdma_gid_index=3"],
    "rdma_gpudirect": [*CLUSTER, "--rdma_gpudirect"],
    "rdma_retry_count": [*CLUSTER, "--rdma_retry_count=5"],
    "rdma_service_level": [*CLUSTER, "--rdma_service_level=2"],
    "rdma_timeout": [*CLUSTER, "--rdma_timeout=0.5"],
    "rdma_traffic_class": [*CLUSTER, "--rdma_traffic_class=106"],
    "save_model_secs": [*CLUSTER, "--train_dir=x", "--save_model_secs=5"],
    "save_model_steps": [*CLUSTER, "--train_dir=x", "--save_model_steps=5"],
    "from_scratch": [*CLUSTER, "--train_dir=x", "--from_scratch"],
    "variable_update": ["--ps=1", "--workers=1", "--variable_update=distributed_replicated"],
    "local_parameter_device": ["--local_parameter_device=cpu"],
    "wire_dtype": ["--wire_dtype=bfloat16"],
    "model": ["--model=lenet"],
    "device": ["--device=cpu"],
    "data_format": ["--data_format=NHWC"],
    "data_name": ["--data_name=cifar10"],
    "optimizer": ["--optimizer=adamw"],
    "timing_dir": ["--timing_dir=somewhere"],
    "train_dir": ["--train_dir=somewhere"],
    "cross_replica_sync": ["--nocross_replica_sync"],
    "deterministic": ["--deterministic"],
    "compile": ["--compile"],
    "server_protocol": ["--ps=1", "--workers=1", "--server_protocol=grpc"],
    "verbose": ["--verbose"],
    "on_stall": [*CLUSTER, "--on_stall=report"],
    "on_verdict": [*CLUSTER, "--on_verdict=cat"],
    "verdict_webhook": [*CLUSTER, "--verdict_webhook=http://127.0.0.1:1/"],
    "metrics_port": [*CLUSTER, "--metrics_port=9400"],
    "metrics_file": [*CLUSTER, "--metrics_file=lockstep.prom"],
    "on_nan_parameters": ["--on_nan_parameters=report"],
    "data_dir": ["--data_dir=FOLDER_OF_CLASSES"],
    "piecewise_learning_rate_schedule": ["--piecewise_learning_rate_schedule=0.1;5;0.01"],
    "num_epochs_per_decay": [*DECAY, "--num_epochs_per_decay=3"],
    "learning_rate_decay_factor": [DECAY[0], "--num_epochs_per_decay=2", "--learning_rate_decay_factor=0.5"],
    "minimum_learning_rate": [*DECAY, "--num_epochs_per_decay=2", "--minimum_learning_rate=0.01"],
    "num_learning_rate_warmup_epochs": ["--init_learning_rate=1", "--num_learning_rate_warmup_epochs=2"],
    "summary_verbosity": ["--train_dir=x", "--summary_verbosity=2"],
    "save_summaries_steps": ["--train_dir=x", "--summary_verbosity=1", "--save_summaries_steps=3"],
    "eval": ["--train_dir=x", "--eval"],
    "eval_during_training_every_n_steps": ["--data_name=digits", "--eval_during_training_every_n_steps=2"],
    "eval_during_training_every_n_epochs": ["--data_name=digits", "--eval_during_training_every_n_epochs=2"],
    "eval_during_training_at_specified_steps": [
        "--data_name=digits",
        "--eval_during_training_at_specified_steps=2,4",
    ],
    "eval_during_training_at_specified_epochs": [
        "--data_name=digits",
        "--eval_during_training_at_specified_epochs=1,2.5",
    ],
    "stop_at_top_1_accuracy": [*EVALUATED, "--stop_at_top_1_accuracy=0.9"],
    "fp16_enable_auto_loss_scale": ["--use_fp16", "--fp16_enable_auto_loss_scale"],
    "all_reduce_spec": [*COLLECTIVE, "--all_reduce_spec=gloo"],
    "gradient_repacking": [*COLLECTIVE, "--gradient_repacking=4"],
    "collective_port": [*COLLECTIVE, "--collective_port=4000"],
}
"""A command line for each working flag whose value is no plain number."""

LOCAL = ["--ps=1", "--workers=1"]

BASELINES: dict[str, list[str]] = {
    "job_name": CLUSTER,
    "task_index": CLUSTER,
    "ps_hosts": CLUSTER,
    "worker_hosts": CLUSTER,
    "bind": CLUSTER,
    "startup_timeout": CLUSTER,
    "stall_after": CLUSTER,
    "user_code_timeout": CLUSTER,
    "rejoin_timeout": CLUSTER,
    "grace": CLUSTER,
    "on_worker_loss": CLUSTER,
    "restarts": CLUSTER,
    "spares": [*CLUSTER, "--restarts=5"],
    "server_replicas": REPLICATED,
    "rdma_device": CLUSTER,
    "rdma_gid_index": CLUSTER,
    "rdma_gpudirect": CLUSTER,
    "rdma_retry_count": CLUSTER,
    "rdma_service_level": CLUSTER,
    "rdma_timeout": CLUSTER,
    "rdma_traffic_class": CLUSTER,
    "save_model_secs": [*CLUSTER, "--train_dir=x"],
    "save_model_steps": [*CLUSTER, "--train_dir=x"],
    "from_scratch": [*CLUSTER, "--train_dir=x"],
    "ps": LOCAL,
    "workers": LOCAL,
    "variable_update": LOCAL,
    "on_stall": CLUSTER,
    "on_verdict": CLUSTER,
    "verdict_webhook": CLUSTER,
    "metrics_port": CLUSTER,
    "metrics_file": CLUSTER,
    "server_protocol": LOCAL,
    "num_epochs_per_decay": [*DECAY, "--num_epochs_per_decay=2"],
    "learning_rate_decay_factor": [*DECAY, "--num_epochs_per_decay=2"],
    "minimum_learning_rate": [*DECAY, "--num_epochs_per_decay=2"],
    "num_learning_rate_warmup_epochs": ["--init_learning_rate=1"],
    "summary_verbosity": ["--train_dir=x"],
    "save_summaries_steps": ["--train_dir=x", "--summary_verbosity=1"],
    "eval": ["--train_dir=x"],
    "eval_during_training_every_n_steps": ["--data_name=digits"],
    "eval_during_training_every_n_epochs": ["--data_name=digits"],
    "eval_during_training_at_specified_steps": ["--data_name=digits"],
    "eval_during_training_at_specified_epochs": ["--data_name=digits"],
    "stop_at_top_1_accuracy": EVALUATED,
    "fp16_enable_auto_loss_scale": ["--use_fp16"],
    "all_reduce_spec": COLLECTIVE,
    "gradient_repacking": COLLECTIVE,
    "collective_port": COLLECTIVE,
}
"""What to compare it with, where that is not the empty command line."""


def test_every_flag_of_tf_cnn_benchmarks_is_accounted_for() -> None:
    assert len(UPSTREAM) == 138
    assert sorted(UPSTREAM + OLDER) == sorted(flag.name for flag in TABLE if flag.upstream)


def test_the_list_of_our_own_flags_does_not_grow_by_accident() -> None:
    assert sorted(OURS) == sorted(flag.name for flag in TABLE if not flag.upstream)


def test_the_list_of_working_upstream_flags_does_not_shrink_by_accident() -> None:
    assert sorted(WORKING) == sorted(flag.name for flag in TABLE if flag.upstream and flag.status is Status.WORKS)


def test_no_flag_is_declared_twice() -> None:
    assert len(BY_NAME) == len(TABLE)


def test_no_name_reads_as_the_opposite_of_another_switch() -> None:
    switches = {f"no{flag.name}" for flag in TABLE if flag.kind is FlagKind.SWITCH}
    assert not switches & set(BY_NAME)


def test_every_reference_between_flags_points_to_one() -> None:
    for flag in TABLE:
        for other in filter(None, (flag.needs, flag.same_as, flag.only_with[0] if flag.only_with else "")):
            assert other in BY_NAME
        if flag.only_with:
            assert set(flag.only_with[1]) <= set(BY_NAME[flag.only_with[0]].choices)
    assert {name for names in EXCLUSIVE for name in names} <= set(BY_NAME)


def test_every_group_has_a_title_and_a_flag() -> None:
    assert set(TITLES) == set(Group) == {flag.group for flag in TABLE}


@pytest.mark.parametrize("flag", TABLE, ids=lambda flag: flag.name)
def test_a_row_is_complete(flag: Flag) -> None:
    assert flag.help
    assert bool(flag.reason) == (flag.status is not Status.WORKS)
    assert not flag.reason or flag.reason.endswith(".")
    assert bool(flag.choices) == (flag.kind is FlagKind.CHOICE)
    assert flag.kind is not FlagKind.CHOICE or flag.default in flag.choices
    assert flag.default is None or flag.kind is FlagKind.SECRET or read_value(flag, flag.default_text()) == flag.default


def _another_value(flag: Flag) -> str:
    """Any value but the default."""
    if flag.kind is FlagKind.SWITCH:
        return str(not flag.default)
    if flag.kind is FlagKind.CHOICE:
        return next(choice for choice in flag.choices if choice != flag.default)
    if flag.kind in (FlagKind.WHOLE, FlagKind.NUMBER):
        number = float(flag.default) if isinstance(flag.default, (int, float)) else 0.0
        return "7" if flag.kind is FlagKind.WHOLE else ("0.25" if number != 0.25 else "0.5")
    return "something"


def _flags(status: Status) -> list[Flag]:
    return [flag for flag in TABLE if flag.status is status]


@pytest.mark.parametrize("flag", _flags(Status.REFUSED), ids=lambda flag: flag.name)
def test_a_refused_flag_is_refused_with_its_reason(flag: Flag) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bench([f"--{flag.name}={_another_value(flag)}"], {})
    (sentence,) = caught.value.sentences
    shown = "..." if flag.kind is FlagKind.SECRET else _another_value(flag)
    assert sentence == f"--{flag.name}={shown} is refused: {flag.reason}"


@pytest.mark.parametrize(
    "flag", [flag for flag in _flags(Status.REFUSED) if flag.default is not None], ids=lambda flag: flag.name
)
def test_a_refused_flag_that_asks_for_nothing_is_accepted(flag: Flag) -> None:
    assert parse_bench([f"--{flag.name}={flag.default_text()}"], {}) == parse_bench([], {})


@pytest.mark.parametrize("flag", _flags(Status.NOTICE), ids=lambda flag: flag.name)
def test_a_flag_without_effect_says_why_and_changes_nothing(flag: Flag) -> None:
    config = parse_bench([f"--{flag.name}={_another_value(flag)}"], {})
    assert config == parse_bench([], {})
    assert config.output.notices == (f"--{flag.name}={_another_value(flag)} has no effect here: {flag.reason}",)


KEY_FLAGS = ("key_file", "insecure")
"""Read before the others, for every command (test_key_flags.py)."""


@pytest.mark.parametrize(
    "flag", [flag for flag in _flags(Status.WORKS) if flag.name not in KEY_FLAGS], ids=lambda flag: flag.name
)
def test_a_working_flag_changes_the_run(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    argv = EFFECTS.get(flag.name, [f"--{flag.name}={_another_value(flag)}"])
    argv = [word.replace("FOLDER_OF_CLASSES", str(tmp_path)) for word in argv]
    assert parse_bench(argv, {}) != parse_bench(BASELINES.get(flag.name, []), {})


@pytest.mark.parametrize("flag", ["metrics_port=9400", "metrics_file=lockstep.prom"])
def test_metrics_without_a_monitor_are_refused(flag: str) -> None:
    with pytest.raises(BadInput, match=f"--{flag.partition('=')[0]} needs a monitor.*; add --ps=1 --workers=1"):
        parse_bench([f"--{flag}"], {})


@pytest.mark.parametrize("flag", ["on_verdict=true", "verdict_webhook=http://127.0.0.1:1/"])
def test_pages_that_nobody_would_send_are_refused(flag: str) -> None:
    with pytest.raises(BadInput, match=f"--{flag.partition('=')[0]} would never be .*; add --ps=1 --workers=1"):
        parse_bench([f"--{flag}"], {})
    parse_bench([f"--{flag}", "--ps=1", "--workers=1"], {})
