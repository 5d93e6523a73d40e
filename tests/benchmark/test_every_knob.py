"""Every flag that "works" is held to an effect: by a run with and without it here, or by a test that is named here."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmark.runs import BASE, NoProgress, Ran, run
from lockstep.benchmark.data.device_batches import DeviceBatches
from lockstep.benchmark.data.pipeline import DecodePipeline
from lockstep.benchmark.outputs.observers import RunObserver
from lockstep.benchmark.training.inputs import input_patience
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.run import choose_devices, run_single, set_up_torch
from lockstep.cli.flags import parse_bench
from lockstep.cli.flags.flag import Status
from lockstep.cli.flags.table import TABLE
from lockstep.errors import BadInput

pytestmark = pytest.mark.timeout(120)
TESTS = Path(__file__).parents[1]
RATE = "--init_learning_rate=0.05"
Probe = Callable[[Ran], object]


class Counts(RunObserver):
    """Counts steps, and looks at the input while its processes live."""

    def __init__(self) -> None:
        self.steps = 0
        self.processes = 0
        self.slots = 0

    def gradients(self, job: BenchJob, step: int) -> None:
        self.steps += 1
        (stream,) = job._inputs
        if isinstance(stream, DeviceBatches) and isinstance(stream.batches, DecodePipeline):
            self.processes = len(stream.batches.pids)
            self.slots = stream.batches._slots.shape.slots


@dataclass(frozen=True)
class Knob:
    """Two command lines that differ in one flag, and what must differ after a short run of each."""

    changed: tuple[str, ...]
    probe: Probe
    base: tuple[str, ...] = (RATE,)
    steps: int = 3
    counts: list[Counts] = field(default_factory=list)


def parameters(ran: Ran) -> bytes:
    return b"".join(value.numpy().tobytes() for _, value in sorted(ran.parameters().items()))


def names(ran: Ran) -> list[str]:
    return sorted(ran.parameters())


def pixels(ran: Ran) -> bytes:
    assert ran.job.last_batch is not None
    return ran.job.last_batch[0].contiguous().numpy().tobytes()


def layout(ran: Ran) -> bool:
    assert ran.job.last_batch is not None
    return ran.job.last_batch[0].is_contiguous(memory_format=torch.channels_last)


def images(ran: Ran) -> int:
    assert ran.job.last_batch is not None
    return len(ran.job.last_batch[0])


def step_lines(ran: Ran) -> int:
    return sum("images/sec: " in line and line[0].isdigit() for line in ran.lines)


def evaluations(ran: Ran) -> list[str]:
    return [line.rpartition("[")[2] for line in ran.lines if "Accuracy @ 1" in line]


DECAY = (RATE, "--learning_rate_decay_factor=0.5", "--num_epochs_per_decay=0.003")
MOMENTUM = (RATE, "--optimizer=momentum")
RMSPROP = (RATE, "--optimizer=rmsprop")
ADAM = (RATE, "--optimizer=adam")
AUTO_SCALE = (RATE, "--use_fp16", "--fp16_enable_auto_loss_scale")
EVALUATED = (RATE, "--num_eval_batches=1", "--eval_during_training_every_n_steps=2")

KNOBS: dict[str, Knob] = {
    "batch_size": Knob(("--batch_size=6",), images, base=(RATE, "--batch_size=4")),
    "num_batches": Knob(("--num_batches=4",), lambda ran: ran.result.num_steps),
    "num_warmup_batches": Knob(("--num_warmup_batches=2",), parameters, base=(RATE, "--num_warmup_batches=0")),
    "num_epochs": Knob(("--num_epochs=0.015",), lambda ran: ran.result.num_steps),
    "seed": Knob(("--seed=5",), parameters),
    "tf_random_seed": Knob(("--tf_random_seed=5",), parameters),
    "model": Knob(("--model=trivial",), names, base=(RATE, "--model=lenet"), steps=1),
    "num_gpus": Knob(("--num_gpus=2",), lambda ran: len(ran.job.towers.models)),
    "data_format": Knob(("--data_format=NHWC",), layout),
    "optimizer": Knob(("--optimizer=adam",), parameters),
    "init_learning_rate": Knob((RATE,), parameters, base=("--init_learning_rate=0.1",)),
    "weight_decay": Knob(("--weight_decay=0.1",), parameters),
    "momentum": Knob(("--momentum=0.5",), parameters, base=MOMENTUM),
    "rmsprop_decay": Knob(("--rmsprop_decay=0.5",), parameters, base=RMSPROP),
    "rmsprop_momentum": Knob(("--rmsprop_momentum=0.5",), parameters, base=RMSPROP),
    "rmsprop_epsilon": Knob(("--rmsprop_epsilon=0.5",), parameters, base=RMSPROP),
    "adam_beta1": Knob(("--adam_beta1=0.5",), parameters, base=ADAM),
    "adam_beta2": Knob(("--adam_beta2=0.5",), parameters, base=ADAM),
    "adam_epsilon": Knob(("--adam_epsilon=0.5",), parameters, base=ADAM),
    "gradient_clip": Knob(("--gradient_clip=0.001",), parameters),
    "piecewise_learning_rate_schedule": Knob(
        ("--piecewise_learning_rate_schedule=0.05;0.003;0.01",), parameters, base=()
    ),
    "num_epochs_per_decay": Knob((*DECAY[:2], "--num_epochs_per_decay=0.006"), parameters, base=DECAY),
    "learning_rate_decay_factor": Knob((RATE, "--learning_rate_decay_factor=0.25", DECAY[2]), parameters, base=DECAY),
    "minimum_learning_rate": Knob(("--minimum_learning_rate=0.04",), parameters, base=DECAY),
    "num_learning_rate_warmup_epochs": Knob(("--num_learning_rate_warmup_epochs=0.01",), parameters),
    "loss_type_to_report": Knob(
        ("--loss_type_to_report=base_loss",),
        lambda ran: ran.result.last_average_loss,
        base=(RATE, "--weight_decay=0.1"),
    ),
    "display_every": Knob(("--display_every=1",), step_lines),
    "print_training_accuracy": Knob(("--print_training_accuracy",), lambda ran: ran.job.training_accuracy() is None),
    "distortions": Knob(("--distortions",), pixels),
    "ml_perf": Knob(("--ml_perf",), pixels),
    "datasets_repeat_cached_sample": Knob(("--datasets_repeat_cached_sample",), pixels),
    "forward_only": Knob(("--forward_only",), parameters),
    "use_fp16": Knob(("--use_fp16",), parameters),
    "use_bf16": Knob(("--use_bf16",), parameters),
    "fp16_loss_scale": Knob(("--fp16_loss_scale=64",), lambda ran: ran.job.scale.factor, base=(RATE, "--use_fp16")),
    "fp16_enable_auto_loss_scale": Knob(
        ("--fp16_enable_auto_loss_scale",), lambda ran: ran.job.scale.is_automatic, base=(RATE, "--use_fp16")
    ),
    "fp16_inc_loss_scale_every_n": Knob(
        ("--fp16_inc_loss_scale_every_n=2",), lambda ran: ran.job.scale.factor, base=AUTO_SCALE
    ),
    "variable_consistency": Knob(
        ("--variable_consistency=relaxed",), parameters, base=(RATE, "--variable_update=replicated")
    ),
    "eval_during_training_every_n_steps": Knob(("--eval_during_training_every_n_steps=1",), evaluations),
    "eval_during_training_every_n_epochs": Knob(
        ("--eval_during_training_every_n_epochs=0.005", "--num_eval_batches=1"), evaluations
    ),
    "eval_during_training_at_specified_steps": Knob(
        ("--eval_during_training_at_specified_steps=1,3", "--num_eval_batches=1"), evaluations
    ),
    "eval_during_training_at_specified_epochs": Knob(
        ("--eval_during_training_at_specified_epochs=0.004", "--num_eval_batches=1"), evaluations
    ),
    "eval_batch_size": Knob(("--eval_batch_size=7",), evaluations, base=EVALUATED),
    "num_eval_batches": Knob(
        ("--num_eval_batches=2",), evaluations, base=(RATE, "--eval_during_training_every_n_steps=3")
    ),
    "num_eval_epochs": Knob(
        ("--num_eval_epochs=0.1",), evaluations, base=(RATE, "--eval_during_training_every_n_steps=3")
    ),
    "stop_at_top_1_accuracy": Knob(
        ("--stop_at_top_1_accuracy=0.001",), lambda ran: ran.result.num_steps, base=EVALUATED
    ),
}
"""A short run on the digits shows the effect."""


def _with(base: tuple[str, ...], changed: tuple[str, ...]) -> tuple[str, ...]:
    """The base with the flags of ``changed`` in place of its own."""
    known = {flag.partition("=")[0] for flag in changed}
    return (*(flag for flag in base if flag.partition("=")[0] not in known), *changed)


@cache
def _probed(flags: tuple[str, ...], steps: int) -> Ran:
    base = tuple(flag for flag in BASE if flag.partition("=")[0] not in {f.partition("=")[0] for f in flags})
    if any(flag.startswith("--num_batches") for flag in flags):
        flags, steps = tuple(flag for flag in flags if not flag.startswith("--num_batches")), 4
    return run(*flags, steps=steps, base=base)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOBS)
def test_the_flag_has_an_effect(name: str) -> None:
    knob = KNOBS[name]
    assert any(flag.startswith(f"--{name}") for flag in knob.changed)
    without = knob.probe(_probed(knob.base, knob.steps))
    assert knob.probe(_probed(_with(knob.base, knob.changed), knob.steps)) != without


# -- what needs files --


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """Two classes of small pictures in folders."""
    chance = np.random.default_rng(3)
    for name in ("cat", "dog"):
        folder = tmp_path / "pictures" / "train" / name
        folder.mkdir(parents=True)
        for number in range(4):
            Image.fromarray(chance.integers(0, 256, (48, 64, 3), np.uint8)).save(folder / f"{number}.png")
    return str(tmp_path / "pictures")


FROM_FILES: dict[str, tuple[str, ...]] = {
    "resize_method": ("--resize_method=nearest",),
    "datasets_num_private_threads": ("--datasets_num_private_threads=3",),
    "datasets_prefetch_buffer_size": ("--datasets_prefetch_buffer_size=5",),
    "datasets_use_prefetch": ("--nodatasets_use_prefetch",),
    "data_dir": (),
    "data_name": (),
}


def _from_files(folder: str, *flags: str) -> tuple[object, ...]:
    counts = Counts()
    base = ("--device=cpu", "--model=lenet", "--batch_size=4", "--num_warmup_batches=0", f"--data_dir={folder}")
    ran = run(*flags, base=base, steps=1, observer=counts)
    return pixels(ran), counts.processes, counts.slots, ran.job.classes


@pytest.mark.parametrize("name", FROM_FILES)
def test_the_flag_changes_how_pictures_are_read(name: str, pictures: str) -> None:
    if name in ("data_dir", "data_name"):
        made_up = run(steps=1, base=("--device=cpu", "--model=lenet", "--batch_size=4", "--num_warmup_batches=0"))
        assert _from_files(pictures, "--data_name=pictures")[3] == 2
        assert made_up.job.classes == 1001
        assert run(steps=1).job.classes == 10  # --data_name=digits
        return
    assert _from_files(pictures, *FROM_FILES[name]) != _from_files(pictures)


FILES: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "train_dir": lambda folder: (f"--train_dir={folder}/out",),
    "benchmark_log_dir": lambda folder: (f"--benchmark_log_dir={folder}/out",),
    "trace_file": lambda folder: (f"--trace_file={folder}/out/trace.json",),
    "graph_file": lambda folder: (f"--graph_file={folder}/out/plan.txt",),
    "eval_dir": lambda folder: (
        f"--eval_dir={folder}/out",
        "--eval_during_training_every_n_steps=1",
        "--num_eval_batches=1",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_flag_leaves_a_file(name: str, tmp_path: Path) -> None:
    config = parse_bench([*BASE, "--num_batches=2", *FILES[name](tmp_path)], {})
    run_single(config, lambda _line: None, NoProgress)
    (left, *_) = sorted((tmp_path / "out").iterdir())
    assert left.stat().st_size > 0


def test_evaluations_of_a_trained_model_reach_eval_dir(tmp_path: Path) -> None:
    from lockstep.benchmark.training.run import run_evaluation

    flags = [*BASE, f"--train_dir={tmp_path}/trained", "--num_batches=2"]
    run_single(parse_bench(flags, {}), lambda _line: None, NoProgress)
    asked = [*flags, "--eval", "--num_eval_batches=1", f"--eval_dir={tmp_path}/evaluated"]
    assert run_evaluation(parse_bench(asked, {}), lambda _line: None) is not None
    (events,) = (tmp_path / "evaluated").iterdir()
    assert b"eval/Accuracy@1" in events.read_bytes()


# -- what torch itself shows --


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


OF_TORCH: dict[str, tuple[str, Callable[[], object], object]] = {
    "num_threads": ("--num_threads=3", torch.get_num_threads, 3),
    "num_intra_threads": ("--num_intra_threads=3", torch.get_num_threads, 3),
    "deterministic": ("--deterministic", torch.are_deterministic_algorithms_enabled, True),
}


@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize("name", OF_TORCH)
def test_the_flag_reaches_torch(name: str) -> None:
    flag, look, expected = OF_TORCH[name]
    assert look() != expected
    set_up_torch(parse_bench([*BASE, flag], {}))
    assert look() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_devices(parse_bench(["--device=cpu"], {}))[0].type == "cpu"
    with pytest.raises(BadInput, match="--device=gpu asks for more GPUs than the 0 that this machine shows"):
        parse_bench(["--device=gpu"], {})


MODES, CLUSTER, STILL = "benchmark/test_modes.py", "cluster/test_life_of_a_cluster.py", "benchmark/test_standing_still_"
RECOVERY, VERBS = "cluster/test_recovery.py", "transports/test_verbs.py"
ELSEWHERE: dict[str, tuple[str, str]] = {
    "ps": (MODES, "test_a_cluster_has_the_values_of_the_formula"),
    "workers": (MODES, "test_a_cluster_has_the_values_of_the_formula"),
    "variable_update": (MODES, "test_a_cluster_has_the_values_of_the_formula"),
    "gradient_repacking": (MODES, "test_a_collective_travels_in_as_many_pieces_as_asked"),
    "all_reduce_spec": (MODES, "test_a_collective_travels_in_as_many_pieces_as_asked"),
    "bucket_mb": (MODES, "test_a_cluster_tells_its_times_and_its_buckets"),
    "wire_dtype": ("cluster/test_recovery.py", "test_16_bit_gradients_survive_a_kill_and_give_other_bits_than_32"),
    "compile": (
        "benchmark/training/test_compiling.py",
        "test_a_compiled_run_asks_for_fused_optimizers_and_larger_buckets",
    ),
    "timing_dir": (MODES, "test_a_cluster_tells_its_times_and_its_buckets"),
    "verbose": (MODES, "test_a_cluster_tells_its_times_and_its_buckets"),
    "collective_port": (f"{STILL}without_servers.py", "test_workers_with_different_settings_do_not_start"),
    "stall_after": (
        f"{STILL}without_servers.py",
        "test_a_frozen_chief_which_keeps_the_store_is_named_too_and_the_stall_ends_the_others",
    ),
    "mps": (
        "runtime/local_cluster/test_gpu_sharing.py",
        "test_servers_on_the_gpu_of_workers_share_it_unless_told_not_to",
    ),
    "job_name": ("cluster/tasks.py", "start"),
    "task_index": ("cluster/tasks.py", "start"),
    "ps_hosts": ("cluster/tasks.py", "start"),
    "worker_hosts": ("cluster/tasks.py", "start"),
    "ports": ("cluster/test_listeners.py", "test_a_job_listens_at_its_listed_addresses_and_in_its_range"),
    "require_private": (
        "runtime/task/test_paths.py",
        "test_between_hosts_private_tensors_take_encrypted_tcp_and_the_bits_stay_the_same",
    ),
    "server_protocol": (CLUSTER, "test_report_1_command_lines_train"),
    "local_parameter_device": (CLUSTER, "test_report_1_command_lines_train"),
    "cross_replica_sync": (CLUSTER, "test_asynchronous_training_ends_on_every_task"),
    "startup_timeout": (CLUSTER, "test_a_missing_task_is_named_with_what_was_found_and_ends_the_start"),
    "bind": ("runtime/startup/test_preflight.py", "test_bind_names_another_address_to_listen_on"),
    "on_stall": ("runtime/watch/test_watchdog.py", "test_with_on_stall_report_the_job_goes_on_when_it_can"),
    "on_verdict": ("runtime/watch/test_pager.py", "test_a_report_calls_a_command_and_a_webhook_once"),
    "verdict_webhook": ("runtime/watch/test_pager.py", "test_a_report_calls_a_command_and_a_webhook_once"),
    "metrics_port": ("oncall/test_prometheus.py", "test_an_alert_fires_while_a_task_is_frozen"),
    "metrics_file": ("runtime/monitor/test_metrics.py", "test_a_file_is_written_for_each_task_and_says_how_it_ended"),
    "on_nan_parameters": (
        "benchmark/training/test_finite_parameters.py",
        "test_report_says_it_once_and_the_run_goes_on",
    ),
    "user_code_timeout": (
        "runtime/watch/test_watchdog.py",
        "test_user_code_that_waits_is_noticed_with_its_line_and_the_seconds_left_and_ends_the_job_after_its_own_time",
    ),
    "grace": ("cluster/test_signals.py", "test_a_checkpoint_that_takes_too_long_is_not_waited_for"),
    "rejoin_timeout": ("benchmark/test_every_knob.py", "test_input_is_waited_for_as_long_as_a_lost_task"),
    "key_file": ("cli/test_key_flags.py", "test_every_command_takes_the_key_flags_wherever_they_stand"),
    "insecure": ("cli/test_key_flags.py", "test_insecure_is_said_once_and_passed_on"),
    "resnet_base_lr": ("benchmark/settings/test_schedules.py", "test_resnets_take_another_base"),
    "display_perf_ewma": (
        "benchmark/outputs/test_metrics.py",
        "test_the_ends_of_the_weighted_mean_are_all_steps_and_the_last_step",
    ),
    "summary_verbosity": ("benchmark/outputs/test_outputs.py", "test_tensorboard_reads_what_was_asked_for"),
    "save_summaries_steps": ("benchmark/outputs/test_outputs.py", "test_summaries_come_as_often_as_asked"),
    "trace_steps": ("benchmark/outputs/test_outputs.py", "test_a_trace_shows_the_last_steps"),
    "benchmark_test_id": ("benchmark/outputs/test_outputs.py", "test_the_metric_log_has_a_line_for_each_number"),
    "max_bad_records": ("benchmark/data/test_pipeline.py", "test_more_bad_records_than_allowed_end_the_run"),
    "eval": ("benchmark/test_features.py", "test_an_evaluation_without_parameters_says_so"),
    "eval_interval_secs": ("benchmark/test_features.py", "test_evaluations_follow_one_another_until_stopped"),
    "save_model_steps": (RECOVERY, "test_a_killed_task_is_started_again_by_its_monitor_and_the_bits_are_the_same"),
    "restarts": (RECOVERY, "test_a_killed_task_is_started_again_by_its_monitor_and_the_bits_are_the_same"),
    "spares": (
        "cluster/test_spares_of_clusters.py",
        "test_the_spare_of_one_command_takes_the_coordinators_place_and_the_bits_are_the_same",
    ),
    "server_replicas": (RECOVERY, "test_the_second_home_of_a_killed_server_takes_over_and_the_bits_are_the_same"),
    "on_worker_loss": (RECOVERY, "test_the_others_go_on_without_a_lost_worker_and_take_it_back"),
    "save_model_secs": (
        "protocol/coordinator/test_protocol_recovery.py",
        "test_a_version_is_saved_when_the_time_since_the_last_one_is_over",
    ),
    "max_ckpts_to_keep": ("runtime/checkpoint/test_checkpoints.py", "test_the_oldest_are_cleared_away"),
    "from_scratch": (
        "runtime/checkpoint/test_damaged_past.py",
        "test_from_scratch_starts_at_step_0_and_puts_aside_what_was_there",
    ),
    "rdma_device": (VERBS, "test_ucx_is_held_to_rdma_and_to_one_port_and_is_told_nothing_that_nobody_chose"),
    **dict.fromkeys(
        ("rdma_gid_index", "rdma_traffic_class", "rdma_service_level", "rdma_timeout", "rdma_retry_count"),
        (VERBS, "test_each_flag_reaches_ucx"),
    ),
    "rdma_gpudirect": (VERBS, "test_gpudirect_needs_a_kernel_that_lets_a_network_device_into_a_gpu"),
    "device": ("benchmark/test_every_knob.py", "test_a_device_that_is_not_there_is_refused"),
}
"""Flags whose effect another test shows: its file and its name."""
OTHER_WORDS = {"display_perf_ewma": "ewma", "save_model_secs": "save_seconds", "max_ckpts_to_keep": "keep"}


def test_input_is_waited_for_as_long_as_a_lost_task() -> None:
    hosts = ("--ps_hosts=10.0.0.1:1", "--worker_hosts=10.0.0.1:2", "--job_name=worker")
    assert input_patience(parse_bench([*hosts, "--rejoin_timeout=7"], {})) == 7


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_that_is_named_exists_and_speaks_of_the_flag(name: str) -> None:
    path, function = ELSEWHERE[name]
    text = (TESTS / path).read_text()
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(found) == 1
    # The flag may stand in a constant or a table of the file that the test reads.
    assert OTHER_WORDS.get(name, name) in text


def test_every_flag_that_works_is_held_to_an_effect() -> None:
    shown = {*KNOBS, *FROM_FILES, *FILES, *OF_TORCH, *ELSEWHERE}
    assert sorted(shown) == sorted(flag.name for flag in TABLE if flag.status is Status.WORKS)
