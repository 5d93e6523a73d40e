"""A sequence-to-sequence model on synthetic tokens: the model of ``examples/seq2seq.py`` as a benchmark.

The second of the reports that Lockstep answers was about such a model. The first token says whether the digits after
it are to be reversed or sorted. The question and the answer so far form one row, because a batch is one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

REVERSE, SORT, START, FIRST_DIGIT = 0, 1, 2, 3
VOCABULARY = FIRST_DIGIT + 10
LENGTH = 7
WIDTH = 256
LAYERS = 3


class Translator(nn.Module):
    """Encoder and decoder with attention; each answer token sees the question and the answer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH + 1, WIDTH) * 0.02)
        heads, inner = WIDTH // 64, 4 * WIDTH
        asks = nn.TransformerEncoderLayer(WIDTH, heads, inner, dropout=0.0, batch_first=True, norm_first=True)
        says = nn.TransformerDecoderLayer(WIDTH, heads, inner, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(asks, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(says, LAYERS, nn.LayerNorm(WIDTH))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (batch, ``LENGTH``, ``VOCABULARY``) for rows of question and shifted answer."""
        question, before = rows.split([LENGTH + 1, LENGTH], dim=1)
        source = self.encoder(self.tokens(question) + self.places)
        target = self.tokens(before) + self.places[:LENGTH]
        answer: Tensor = self.out(self.decoder(target, source, tgt_mask=self.mask, tgt_is_causal=True))
        return answer


def translator(num_classes: int) -> Translator:  # noqa: ARG001 - its classes are its tokens
    """The model; it knows its vocabulary itself."""
    return Translator()


def make_batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows ``[what, d1, ..., dn, START, a1, ..., an-1]`` and the answers ``[a1, ..., an]``."""
    digits = torch.randint(FIRST_DIGIT, VOCABULARY, (count, LENGTH), generator=generator)
    what = torch.randint(REVERSE, SORT + 1, (count, 1), generator=generator)
    answers = torch.where(what == SORT, digits.sort(dim=1).values, digits.flip(1))
    before = torch.cat([torch.full_like(what, START), answers[:, :-1]], dim=1)
    return torch.cat([what, digits, before], dim=1), answers
