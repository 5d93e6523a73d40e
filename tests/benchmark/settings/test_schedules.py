"""The learning rate of a step, by formulas written by hand."""

from __future__ import annotations

import pytest

from lockstep.benchmark.models.catalogue import LearningRate
from lockstep.benchmark.settings.features import EvaluationConfig, PrecisionConfig, ScheduleConfig
from lockstep.benchmark.settings.schedules import BadSchedule, Rate, parse_piecewise

OWN = LearningRate(0.128, base_batch=256)


def _at(step: int, constant: float | None = None, **schedule: object) -> float:
    """10 steps an epoch."""
    return Rate(ScheduleConfig(**schedule), constant, OWN).at(step, 10, 100)  # type: ignore[arg-type]


def test_a_constant_rate_stays() -> None:
    assert [_at(step, 0.3) for step in (0, 9, 1000)] == [0.3] * 3


def test_a_piecewise_rate_changes_at_its_epochs() -> None:
    rates = [_at(step, piecewise="0.4;2;0.2;3;0.1") for step in (0, 19, 20, 29, 30, 500)]
    assert rates == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]


def test_a_rate_decays_in_stairs_down_to_its_minimum() -> None:
    def at(step: int) -> float:
        return _at(step, 0.8, num_epochs_per_decay=2.0, decay_factor=0.5, minimum=0.15)

    assert [at(step) for step in (0, 19, 20, 40, 60, 80)] == [0.8, 0.8, 0.4, 0.2, 0.15, 0.15]


def test_the_warm_up_rises_from_zero() -> None:
    assert [_at(step, 0.6, warmup_epochs=2.0) for step in (0, 5, 19, 20)] == [0.0, 0.15, 0.6 * 19 / 20, 0.6]
    assert _at(10, None, piecewise="0.4;1;0.1", warmup_epochs=2.0) == 0.2


def test_resnets_take_another_base() -> None:
    assert _at(0) == 0.128 * 10 / 256
    assert _at(0, resnet_base_lr=0.256) == 0.256 * 10 / 256


@pytest.mark.parametrize("text", ["", "0.1;30", "a;b;c", "0.1;30;0.01;20;0.001", "0.1;-3;0.1", "-1"])
def test_a_schedule_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadSchedule):
        parse_piecewise(text)


@pytest.mark.parametrize(
    ("asked", "due"),
    [
        (EvaluationConfig(every_n_steps=3), [3, 6, 9, 12]),
        (EvaluationConfig(every_n_epochs=0.5), [2, 4, 6, 7, 9, 11]),
        (EvaluationConfig(at_steps=(1, 7)), [1, 7]),
        (EvaluationConfig(at_epochs=(1.0, 2.0)), [4, 7]),
        (EvaluationConfig(), []),
    ],
)
def test_evaluations_are_due_at_the_steps_asked_for(asked: EvaluationConfig, due: list[int]) -> None:
    """3.5 steps an epoch."""
    assert [step for step in range(1, 13) if asked.is_due(step, 3.5)] == due


def test_the_loss_scale_is_128_with_fp16_and_nothing_else() -> None:
    assert PrecisionConfig(use_fp16=True).first_scale == 128
    assert PrecisionConfig(use_bf16=True).first_scale == 1
    assert PrecisionConfig(use_fp16=True, loss_scale=8).first_scale == 8
    assert PrecisionConfig(loss_scale=8).first_scale == 1
