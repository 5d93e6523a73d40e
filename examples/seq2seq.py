"""Your own sequence-to-sequence model on several ranks: reversing and sorting sequences of tokens.

An encoder-decoder with attention, 5.5 million parameters. The first token says what to do with the rest. Start it on
one machine as two ranks that train, or as one server and two workers::

    torchrun --nproc-per-node=2 examples/seq2seq.py
    torchrun --nproc-per-node=3 examples/seq2seq.py --servers=1

Lockstep needs only the lines marked with (lockstep).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import lockstep  # (lockstep)

REVERSE, SORT, START, FIRST_DIGIT = 0, 1, 2, 3
DIGITS = 10
VOCABULARY = FIRST_DIGIT + DIGITS


def make_examples(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Questions ``[what, d1, ..., dn]`` and their answers ``[a1, ..., an]``."""
    digits = torch.randint(FIRST_DIGIT, VOCABULARY, (count, length), generator=generator)
    what = torch.randint(REVERSE, SORT + 1, (count, 1), generator=generator)
    answers = torch.where(what == SORT, digits.sort(dim=1).values, digits.flip(1))
    return torch.cat([what, digits], dim=1), answers


class Translator(nn.Module):
    """Encoder and decoder with attention; every answer token sees the question and the answer so far."""

    def __init__(self, size: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size)
        self.places = nn.Parameter(torch.randn(length + 1, size) * 0.02)
        heads, inner = max(1, size // 64), 4 * size
        asks = nn.TransformerEncoderLayer(size, heads, inner, dropout=0.0, batch_first=True, norm_first=True)
        says = nn.TransformerDecoderLayer(size, heads, inner, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(asks, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(says, layers, nn.LayerNorm(size))
        self.out = nn.Linear(size, VOCABULARY)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, questions: Tensor, before: Tensor) -> Tensor:
        source = self.tokens(questions) + self.places
        target = self.tokens(before) + self.places[: before.shape[1]]
        mask = self.mask[: before.shape[1], : before.shape[1]]
        answer: Tensor = self.out(self.decoder(target, self.encoder(source), tgt_mask=mask, tgt_is_causal=True))
        return answer


def shifted(answers: Tensor) -> Tensor:
    """What the decoder has seen before each answer token."""
    return torch.cat([torch.full_like(answers[:, :1], START), answers[:, :-1]], dim=1)


@torch.no_grad()
def whole_sequences_right(model: nn.Module, questions: Tensor, answers: Tensor) -> float:
    """The share of questions whose whole answer is right, each token generated from the model's own earlier ones."""
    said = torch.full_like(answers[:, :1], START)
    for _ in range(answers.shape[1]):
        said = torch.cat([said, model(questions, said)[:, -1:].argmax(-1)], dim=1)
    return float((said[:, 1:] == answers).all(dim=1).float().mean())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="layers of the encoder and of the decoder")
    parser.add_argument("--length", type=int, default=7, help="tokens per sequence")
    parser.add_argument("--batch_size", type=int, default=64, help="sequences per worker and step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--servers", type=int, default=0, help="how many of the first ranks serve")
    parser.add_argument("--held_out", type=int, default=1000, help="sequences that are never trained on")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    torch.manual_seed(1)
    with lockstep.join(servers=asked.servers) as job:  # (lockstep) a server stays here until the job has ended
        model = Translator(asked.size, asked.layers, asked.length)
        optimizer = torch.optim.Adam(model.parameters(), lr=asked.learning_rate, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, asked.learning_rate, total_steps=asked.steps + 1, pct_start=0.15, cycle_momentum=False
        )
        job.wrap(model, optimizer)  # (lockstep)
        held_out = make_examples(asked.held_out, asked.length, torch.Generator().manual_seed(0))
        known = {tuple(question) for question in held_out[0].tolist()}
        if job.is_chief:
            print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {job.workers} workers", flush=True)
        started = time.perf_counter()
        for step in job.steps(asked.steps):  # (lockstep) other random numbers on every worker in every step
            questions, answers = make_examples(asked.batch_size, asked.length, torch.default_generator)
            fresh = torch.tensor([tuple(question) not in known for question in questions.tolist()])
            guesses = model(questions, shifted(answers))
            losses = nn.functional.cross_entropy(guesses.flatten(0, 1), answers.flatten(), reduction="none")
            loss = losses.view_as(answers)[fresh].mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if job.is_chief and (step + 1) % max(1, asked.steps // 10) == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
        if job.is_chief:
            model.eval()
            right = whole_sequences_right(model, *held_out)
            print(f"{right:.1%} of {asked.held_out} held-out sequences are wholly right", flush=True)


if __name__ == "__main__":
    main()
