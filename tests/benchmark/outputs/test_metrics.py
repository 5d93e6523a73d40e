"""Speeds by hand, and lines to the last space."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.benchmark.outputs.metrics import (
    Accuracy,
    Banner,
    Speed,
    banner_lines,
    epochs_of,
    eval_result_line,
    eval_step_line,
    is_reported,
    step_header,
    step_line,
    step_speed,
    total_lines,
    total_speed,
)

BANNER = Banner(
    version="0.1.0",
    model="resnet50",
    dataset="imagenet",
    synthetic=True,
    mode="training",
    global_batch=128,
    device_batch=64,
    num_batches=100,
    num_epochs=0.01,
    devices=["/job:worker/replica:0/task:0/gpu:0"],
    optimizer="sgd",
    variable_update="parameter_server",
)


def test_speed_of_one_step_has_no_uncertainty() -> None:
    assert step_speed(64, [0.5]) == Speed(mean=128.0, uncertainty=0.0, jitter=0.0)


def test_speed_is_the_batch_over_the_mean_time_and_not_the_mean_of_speeds() -> None:
    speed = step_speed(10, [1.0, 2.0, 4.0])  # speeds 10, 5, 2.5
    assert speed.mean == pytest.approx(10 / (7 / 3))
    mean = 17.5 / 3
    deviation = math.sqrt(((10 - mean) ** 2 + (5 - mean) ** 2 + (2.5 - mean) ** 2) / 3)
    assert speed.uncertainty == pytest.approx(deviation / math.sqrt(3))
    assert speed.jitter == pytest.approx(1.4826 * 2.5)  # median of |5|, |0|, |-2.5| around the median 5


def test_jitter_of_an_even_number_of_steps_takes_the_mean_of_the_middle_two() -> None:
    speed = step_speed(12, [1.0, 2.0, 3.0, 4.0])  # speeds 12, 6, 4, 3: median 5, distances 7, 1, 1, 2
    assert speed.jitter == pytest.approx(1.4826 * 1.5)


def test_weighted_speed_gives_the_newest_step_the_most_weight() -> None:
    times = [1.0, 2.0, 4.0]
    weighted = step_speed(10, times, ewma=0.5)
    mean_time = (0.25 * 1.0 + 0.5 * 2.0 + 1.0 * 4.0) / 1.75
    assert weighted.mean == pytest.approx(10 / mean_time)
    plain = step_speed(10, times)
    assert (weighted.uncertainty, weighted.jitter) == (plain.uncertainty, plain.jitter)


@pytest.mark.parametrize(("ewma", "mean"), [(None, 10 / 1.5), (0.0, 10 / 1.5), (1.0, 10 / 2.0)])
def test_the_ends_of_the_weighted_mean_are_all_steps_and_the_last_step(ewma: float | None, mean: float) -> None:
    assert step_speed(10, [1.0, 2.0], ewma=ewma).mean == pytest.approx(mean)


def test_a_long_run_with_a_small_weight_stays_finite() -> None:
    assert step_speed(10, [0.5] * 5000, ewma=0.9).mean == pytest.approx(20.0)


def test_total_speed_counts_all_workers() -> None:
    assert total_speed(num_workers=2, num_steps=10, worker_batch=64, seconds=5.0) == 256.0


def test_epochs_are_batches_over_the_data_set() -> None:
    assert epochs_of(num_batches=100, global_batch=128, images_per_epoch=1_281_167) == pytest.approx(0.00999, rel=1e-3)


def test_the_first_step_and_every_tenth_are_reported() -> None:
    assert [step for step in range(1, 31) if is_reported(step, 10)] == [1, 10, 20, 30]
    assert [step for step in range(1, 4) if is_reported(step, 1)] == [1, 2, 3]


def test_step_line_to_the_last_character() -> None:
    line = step_line(10, Speed(1234.56, 7.89, 0.04), 7.65432)
    assert line == "10\timages/sec: 1234.6 +/- 7.9 (jitter = 0.0)\t7.654"
    assert len(line.split()) == 9


def test_step_line_with_accuracies_has_two_more_fields() -> None:
    line = step_line(1, Speed(100.0, 0.0, 0.0), 6.9, Accuracy(0.03125, 0.25))
    assert line == "1\timages/sec: 100.0 +/- 0.0 (jitter = 0.0)\t6.900\t0.031\t0.250"
    assert len(line.split()) == 11


def test_a_loss_that_is_not_a_number_is_shown_as_such() -> None:
    assert step_line(1, Speed(1.0, 0.0, 0.0), math.nan).endswith("\tnan")


def test_headers() -> None:
    assert step_header() == "Step\tImg/sec\ttotal_loss"
    assert step_header("base_loss") == "Step\tImg/sec\tbase_loss"
    assert step_header(accuracy=True) == "Step\tImg/sec\ttotal_loss\ttop_1_accuracy\ttop_5_accuracy"


def test_total_lines() -> None:
    assert total_lines(1234.567) == ("-" * 64, "total images/sec: 1234.57", "-" * 64)


def test_evaluation_lines() -> None:
    assert eval_step_line(10, 123.45) == "10\t123.5 examples/sec"
    assert (
        eval_result_line(Accuracy(0.5, 0.98765), 50_000)
        == "Accuracy @ 1 = 0.5000 Accuracy @ 5 = 0.9877 [50000 examples]"
    )


def test_banner_of_a_single_process() -> None:
    assert banner_lines(BANNER) == [
        "Lockstep:    0.1.0",
        "Model:       resnet50",
        "Dataset:     imagenet (synthetic)",
        "Mode:        training",
        "SingleSess:  False",
        "Batch size:  128 global",
        "             64 per device",
        "Num batches: 100",
        "Num epochs:  0.01",
        "Devices:     ['/job:worker/replica:0/task:0/gpu:0']",
        "NUMA bind:   False",
        "Data format: NCHW",
        "Optimizer:   sgd",
        "Variables:   parameter_server",
        "==========",
    ]


def test_banner_of_a_worker_in_a_cluster_says_whether_it_is_synchronous() -> None:
    lines = banner_lines(replace(BANNER, cross_replica_sync=True, variable_update="distributed_replicated"))
    assert lines[-3:] == ["Variables:   distributed_replicated", "Sync:        True", "=========="]


@pytest.mark.parametrize("mode", ["replicated", "distributed_all_reduce", "collective_all_reduce"])
def test_banner_shows_the_all_reduce_where_there_is_one(mode: str) -> None:
    lines = banner_lines(replace(BANNER, variable_update=mode, all_reduce_spec="nccl", staged_vars=True))
    assert lines[-4:] == [f"Variables:   {mode}", "AllReduce:   nccl", "Staged vars: True", "=========="]
    assert "AllReduce:   None" in banner_lines(replace(BANNER, variable_update=mode))


def test_banner_with_real_data_and_grouped_batches() -> None:
    lines = banner_lines(replace(BANNER, synthetic=False, batches_per_group=4, num_epochs=1.5))
    assert lines[2] == "Dataset:     imagenet"
    assert lines[7] == "             4 batches per prepocessing group"
    assert lines[9] == "Num epochs:  1.50"
