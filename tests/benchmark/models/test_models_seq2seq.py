"""The sequence-to-sequence model as a benchmark on made-up tokens."""

from __future__ import annotations

import pytest
import torch

from benchmark.runs import run
from lockstep.benchmark.models import build_model
from lockstep.benchmark.models.seq2seq import LENGTH, REVERSE, SORT, START, VOCABULARY, make_batch
from lockstep.cli.flags import parse_bench
from lockstep.errors import BadInput

SMALL = ("--device=cpu", "--model=seq2seq", "--batch_size=8", "--num_warmup_batches=0", "--optimizer=adam")


def test_rows_hold_the_question_and_the_answer_so_far() -> None:
    rows, answers = make_batch(50, torch.Generator().manual_seed(1))
    assert rows.shape == (50, 2 * LENGTH + 1)
    for row, answer in zip(rows.tolist(), answers.tolist(), strict=True):
        what, digits, before = row[0], row[1 : LENGTH + 1], row[LENGTH + 1 :]
        assert answer == (sorted(digits) if what == SORT else digits[::-1])
        assert before == [START, *answer[:-1]]
    assert {row[0] for row in rows.tolist()} == {REVERSE, SORT}


def test_an_answer_token_does_not_see_those_behind_it() -> None:
    torch.manual_seed(1)
    model = build_model("seq2seq", "imagenet", 1001).eval()
    assert sum(p.numel() for p in model.parameters()) == 5_539_341
    rows, _ = make_batch(2, torch.Generator().manual_seed(1))
    changed = rows.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = model(rows), model(changed)
    assert first.shape == (2, LENGTH, VOCABULARY)
    assert torch.allclose(first[:, :-1], second[:, :-1], atol=1e-6)
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-6)


def test_it_trains_and_learns_its_batch() -> None:
    ran = run("--init_learning_rate=0.001", "--print_training_accuracy", "--display_every=1", base=SMALL, steps=12)
    losses = [float(line.split("\t")[2]) for line in ran.lines if "images/sec: " in line and line[0].isdigit()]
    assert losses[-1] < 0.8 * losses[0]
    accuracy = ran.job.training_accuracy()
    assert accuracy is not None
    assert 0 < accuracy.top_1 <= accuracy.top_5 <= 1


def test_data_of_pictures_is_refused() -> None:
    with pytest.raises(BadInput, match="--model=seq2seq generates its own sequences"):
        parse_bench(["--model=seq2seq", "--data_name=digits"], {})
