"""Each training feature has the effect that it promises."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch

from benchmark.runs import BASE, NoProgress, by_hand, largest_difference, run
from helpers.programs import start_lockstep
from helpers.waiting import wait_until
from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.settings.features import PrecisionConfig
from lockstep.benchmark.training.evaluation import Evaluation, evaluate_once
from lockstep.benchmark.training.run import run_evaluation, run_single
from lockstep.cli.flags import parse_bench
from lockstep.training.export import write_final_parameters
from lockstep.training.worker.loss_scale import LossScale, all_finite

RATE = "--init_learning_rate=0.05"
pytestmark = pytest.mark.timeout(120)


def test_five_steps_give_the_values_of_the_formula() -> None:
    ran = run(RATE, steps=5)
    assert largest_difference(ran.parameters(), by_hand(5)) < 1e-6


def test_weight_decay_has_the_effect_of_its_formula() -> None:
    ran = run(RATE, "--weight_decay=0.5", steps=3)
    assert largest_difference(ran.parameters(), by_hand(3, decay=0.5)) < 1e-6


def test_epochs_are_turned_into_steps_of_the_data_set() -> None:
    ran = run("--num_epochs=0.02")
    assert ran.result.num_steps == math.ceil(0.02 * 1438 / 4)


def test_a_clip_bounds_what_a_step_changes() -> None:
    before = run("--init_learning_rate=0", "--weight_decay=0", steps=1).parameters()
    ran = run("--init_learning_rate=1", "--gradient_clip=0.001", "--weight_decay=0", steps=1)
    assert largest_difference(ran.parameters(), before) == pytest.approx(0.001, rel=1e-3)


def test_the_loss_scale_does_not_change_the_step() -> None:
    plain = run(RATE, "--use_bf16", steps=2)
    scaled = run(RATE, "--use_bf16", "--fp16_loss_scale=64", steps=2)
    assert scaled.job.scale.factor == 64
    assert largest_difference(plain.parameters(), scaled.parameters()) < 2e-3


@pytest.mark.parametrize("flag", ["--use_fp16", "--use_bf16"])
def test_16_bit_arithmetic_is_used_and_stays_near_the_32_bit_result(flag: str) -> None:
    ran = run(RATE, flag, steps=3)
    distance = largest_difference(ran.parameters(), by_hand(3))
    assert 0 < distance < 2e-2


def test_an_automatic_scale_skips_the_step_halves_and_rises_again() -> None:
    precision = PrecisionConfig(use_fp16=True, auto_loss_scale=True, raise_every=2)
    scale = LossScale(precision.first_scale, precision.raised_every)
    assert [scale.note(finite) for finite in (True, False, True, True)] == [True, False, True, True]
    assert scale.factor == 128 / 2 * 2
    assert scale.skipped == 1


def test_infinity_is_found_among_gradients() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, float("inf")])
    assert all_finite([good, None])
    assert not all_finite([good, bad])
    assert not all_finite([torch.tensor([float("nan")])])


def test_a_step_with_infinity_leaves_the_parameters_as_they_are() -> None:
    flags = ("--use_fp16", "--fp16_enable_auto_loss_scale", "--fp16_loss_scale=1e30", "--weight_decay=0")
    untouched = run("--init_learning_rate=0", "--weight_decay=0", steps=1).parameters()
    ran = run(RATE, *flags, steps=2)
    assert ran.job.scale.skipped == 2
    assert largest_difference(ran.parameters(), untouched) == 0


def test_forward_only_changes_nothing() -> None:
    untouched = run("--init_learning_rate=0", "--weight_decay=0", steps=1).parameters()
    ran = run(RATE, "--forward_only", steps=3)
    assert largest_difference(ran.parameters(), untouched) == 0
    assert ran.lines[-2].startswith("total images/sec:")


def test_the_training_accuracy_joins_the_step_lines() -> None:
    ran = run("--print_training_accuracy", steps=1)
    header = next(line for line in ran.lines if line.startswith("Step"))
    assert header.endswith("top_1_accuracy\ttop_5_accuracy")
    assert len(ran.lines[ran.lines.index(header) + 1].split()) == 11


def test_the_base_loss_lacks_the_decay() -> None:
    flags = (RATE, "--weight_decay=0.1")
    total, base = run(*flags, steps=1), run(*flags, "--loss_type_to_report=base_loss", steps=1)
    assert total.result.last_average_loss > base.result.last_average_loss + 0.1
    assert "Step\tImg/sec\tbase_loss" in base.lines


def test_the_first_batch_repeats_where_asked() -> None:
    ran = run("--datasets_repeat_cached_sample", "--init_learning_rate=0", "--display_every=1", steps=3)
    losses = [line.split("\t")[2] for line in ran.lines if "images/sec: " in line and line[0].isdigit()]
    assert len(losses) == 3
    assert len(set(losses)) == 1


def test_distortions_and_means_change_the_pictures() -> None:
    def first_loss(*flags: str) -> float:
        return run("--init_learning_rate=0", *flags, steps=1).result.last_average_loss

    assert len({first_loss(), first_loss("--distortions"), first_loss("--ml_perf")}) == 3


@pytest.mark.slow
@pytest.mark.long
def test_digits_reach_97_percent_and_the_run_stops_there_and_evaluates_to_the_same(tmp_path: Path) -> None:
    lines: list[str] = []
    flags = [*BASE[:3], "--batch_size=64", "--num_warmup_batches=0", "--num_epochs=12", "--optimizer=momentum"]
    flags += ["--init_learning_rate=0.02", f"--train_dir={tmp_path}", "--num_threads=1"]
    during = ["--eval_during_training_every_n_epochs=3", "--stop_at_top_1_accuracy=0.97"]
    result = run_single(parse_bench([*flags, *during], {}), lines.append, NoProgress)
    assert result.accuracy is not None
    assert result.accuracy.top_1 >= 0.97
    assert result.num_steps < math.ceil(12 * 1438 / 64)
    again = run_evaluation(parse_bench([*flags, "--eval"], {}), lines.append)
    assert again is not None
    assert again.accuracy == result.accuracy
    assert again.examples == 359


def test_an_evaluation_without_parameters_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_evaluation(parse_bench([*BASE, "--eval", f"--train_dir={tmp_path}"], {}), lines.append) is None
    assert lines == [f"Checkpoint not found in {tmp_path}"]


def test_parameters_of_another_model_are_refused_in_one_sentence(tmp_path: Path) -> None:
    write_final_parameters(torch.nn.Linear(2, 2), str(tmp_path))
    config = parse_bench([*BASE, "--eval", f"--train_dir={tmp_path}"], {})
    evaluation = Evaluation(config, torch.device("cpu"), torch.contiguous_format)
    model = evaluation.spec.build(10)
    with pytest.raises(BadData, match="does not match this model"):
        evaluate_once(evaluation, model, str(tmp_path), lambda _line: None)


def test_an_evaluation_is_as_long_as_asked(tmp_path: Path) -> None:
    def examples(*flags: str) -> int:
        config = parse_bench([*BASE, *flags], {})
        evaluation = Evaluation(config, torch.device("cpu"), torch.contiguous_format)
        return evaluation.run(evaluation.spec.build(10), lambda _line: None).examples

    assert examples("--eval_batch_size=50", "--num_eval_batches=2") == 100
    assert examples("--eval_batch_size=100") == 359
    assert examples("--eval_batch_size=359", "--num_eval_epochs=2") == 718


@pytest.mark.slow
def test_evaluations_follow_one_another_until_stopped(tmp_path: Path) -> None:
    trained = [*BASE, f"--train_dir={tmp_path}", "--num_batches=1"]
    run_single(parse_bench(trained, {}), lambda _line: None, NoProgress)
    asked = [*trained, "--eval", "--eval_interval_secs=1", "--num_eval_batches=1"]
    with start_lockstep("bench", *asked) as program:
        wait_until(lambda: program.stdout().count("Accuracy @ 1") >= 2, 60, "two evaluations")
        program.signal(signal.SIGINT)
        end = program.wait(20)
    assert end.code == 130
    assert "Traceback" not in end.stderr
