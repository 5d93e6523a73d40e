"""Train, stop in the middle of an epoch, go on, evaluate: the samples and the result are those of an undisturbed run.

What a checkpoint must hold is not tested here: parameters are handed from one job to the next. Plain SGD has no other
state, and the input needs nothing but the number of the step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmark.runs import largest_difference
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.evaluation import Evaluated, Evaluation
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.run import choose_devices
from lockstep.benchmark.training.updates import LocalUpdates
from lockstep.cli.flags import parse_bench

pytestmark = pytest.mark.timeout(120)
State = dict[str, Tensor]
Seen = list[list[int]]


def _train(config: BenchConfig, first: int, end: int, state: State | None = None) -> tuple[State, Seen]:
    """Steps ``first`` to ``end`` of a run, from this state; what it left, and the labels of every step."""
    job = BenchJob(config, 0, choose_devices(config))
    job.begin_at(first)
    try:
        if state is not None:
            job.model.load_state_dict(state)
        updates = LocalUpdates(job)
        seen: Seen = []
        for step in range(first, end):
            batches = job.next_batches()
            updates.begin(step, job.rates(step))
            job.forward_and_backward(batches)
            updates.end()
            seen.append(batches[0][1].tolist())
        return {name: value.clone() for name, value in job.model.state_dict().items()}, seen
    finally:
        job.close()


def _evaluate(config: BenchConfig, state: State) -> Evaluated:
    evaluation = Evaluation(config, torch.device("cpu"), torch.contiguous_format)
    model = evaluation.spec.build(evaluation.data.classes)
    model.load_state_dict(state)
    return evaluation.run(model, lambda _line: None)


def _resumed(config: BenchConfig, at: int, end: int) -> State:
    """Whole, and stopped and resumed: both must be the same to the last bit and sample."""
    whole, all_seen = _train(config, 0, end)
    state, first_seen = _train(config, 0, at)
    resumed, rest_seen = _train(config, at, end, state)
    assert first_seen + rest_seen == all_seen
    assert largest_difference(resumed, whole) == 0
    return resumed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_digits_resumed_in_mid_epoch_reach_97_percent_of_the_held_out_fifth() -> None:
    flags = ("--device=cpu", "--data_name=digits", "--model=lenet", "--batch_size=32", "--num_threads=1")
    config = parse_bench([*flags, "--init_learning_rate=0.1"], {})
    # 45 steps an epoch: step 200 lies in the fifth.
    result = _evaluate(config, _resumed(config, at=200, end=540))
    assert result.examples == 359
    assert result.accuracy.top_1 >= 0.97


def _black_and_white(folder: Path, count: int) -> None:
    """Real files: black ones as JPEG, white ones as PNG, no two the same."""
    chance = np.random.default_rng(7)
    for split, number in (("train", count), ("validation", count // 4)):
        for name, shade in (("black", 20), ("white", 235)):
            place = folder / split / name
            place.mkdir(parents=True)
            for index in range(number):
                size = (int(chance.integers(30, 60)), int(chance.integers(30, 60)), 3)
                pixels = (shade + chance.integers(-20, 20, size)).astype(np.uint8)
                kind = "jpg" if name == "black" else "png"
                Image.fromarray(pixels).save(place / f"{index}.{kind}")


def test_black_and_white_pictures_resumed_in_mid_epoch_are_told_apart_every_time(tmp_path: Path) -> None:
    _black_and_white(tmp_path, 20)
    flags = ("--device=cpu", f"--data_dir={tmp_path}", "--model=lenet", "--batch_size=8", "--num_threads=1")
    config = parse_bench([*flags, "--init_learning_rate=0.02", "--datasets_num_private_threads=1"], {})
    # 5 steps an epoch.
    result = _evaluate(config, _resumed(config, at=7, end=15))
    assert result.examples == 10
    assert result.accuracy.top_1 == 1.0


def test_an_epoch_shows_every_picture_once_also_where_it_was_interrupted(tmp_path: Path) -> None:
    _black_and_white(tmp_path, 20)
    flags = ("--device=cpu", f"--data_dir={tmp_path}", "--model=lenet", "--batch_size=8", "--num_threads=1")
    config = parse_bench([*flags, "--datasets_num_private_threads=1", "--init_learning_rate=0"], {})
    _, before = _train(config, 0, 2)
    _, after = _train(config, 2, 5)
    labels = [label for batch in (*before, *after) for label in batch]
    assert (len(labels), labels.count(0), labels.count(1)) == (40, 20, 20)
