"""The encoder-decoder of ``examples/seq2seq.py`` (5.5 M parameters), with dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.seq2seq import Translator, make_examples, shifted
from programs.data import pinned
from programs.training import Recipe, main, options

DROPOUT = 0.1


def build(size: int, layers: int, length: int) -> nn.Module:
    model = Translator(size, layers, length)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = DROPOUT
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = DROPOUT
    return model


def batches(batch_size: int, length: int, generator: torch.Generator) -> Callable[[], tuple[Tensor, ...]]:
    def batch() -> tuple[Tensor, ...]:
        questions, answers = make_examples(batch_size, length, generator)
        return pinned(questions), pinned(answers)

    return batch


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    questions, answers = batch
    guesses = model(questions, shifted(answers))
    return functional.cross_entropy(guesses.flatten(0, 1).float(), answers.flatten())


if __name__ == "__main__":
    asked = options(__doc__, batch_size=64, length=7, size=256, layers=3).parse_args()
    main(
        asked,
        Recipe(
            build=lambda: build(asked.size, asked.layers, asked.length),
            batches=lambda generator: batches(asked.batch_size, asked.length, generator),
            loss=loss,
        ),
    )
