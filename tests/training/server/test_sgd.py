"""A server's own SGD against ``torch.optim.SGD``: the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from lockstep.runtime.task.store import StoreTimes
from lockstep.training.server.piece_pool import PiecePool
from lockstep.training.server.sgd import PIECE_BYTES, is_plain_sgd, next_version

PIECE = PIECE_BYTES // 4
SIZES = (1, 16, 1000, PIECE, PIECE + 48, 5 * PIECE)
OPTIONS: tuple[dict[str, float | bool], ...] = (
    {},
    {"weight_decay": 4e-5},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.3},
)


def _gradients(workers: int, elements: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + workers)
    return [torch.randn(elements, generator=generator) for _ in range(workers)]


def raised(error: Exception | None) -> None:
    """What a step failed of."""
    if error is not None:
        raise error


@pytest.fixture(name="crew", params=[0, 2], ids=["alone", "with helpers"])
def _crew(request: pytest.FixtureRequest) -> Iterator[PiecePool]:
    with contextlib.closing(PiecePool(request.param)) as crew:
        yield crew


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("elements", SIZES)
def test_three_steps_have_the_bits_of_torch(
    options: dict[str, float | bool], workers: int, elements: int, crew: PiecePool
) -> None:
    start = torch.randn(elements, generator=torch.Generator().manual_seed(7))
    theirs = torch.nn.Parameter(start.clone(), requires_grad=False)
    reference = torch.optim.SGD([theirs], lr=0.1, **options)  # type: ignore[arg-type]
    slots = [start.clone(), torch.empty_like(start)]
    ours = torch.optim.SGD([torch.nn.Parameter(slots[0], requires_grad=False)], lr=0.1, **options)  # type: ignore[arg-type]
    for step in range(3):
        gradients = _gradients(workers, elements, step)
        kept = [gradient.clone() for gradient in gradients]
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        theirs.grad = total / workers if workers > 1 else total
        reference.step()
        old, new = slots[step % 2], slots[(step + 1) % 2]
        before = old.clone()
        next_version(ours, old, new, gradients, workers, crew, StoreTimes(), raised)
        crew.finish()
        assert torch.equal(new, theirs)
        assert torch.equal(old, before), "the old version must stay readable"
        assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True)), "gradients may be loans"


def test_a_mean_over_more_workers_than_sent_one_and_narrow_gradients() -> None:
    """Backup workers and absent gradients: one came, the mean is over two. And 16 bits on the wire."""
    start, gradient = torch.ones(32), torch.full((32,), 3.0)
    new = torch.empty(32)
    optimizer = torch.optim.SGD([torch.nn.Parameter(start, requires_grad=False)], lr=1.0)
    next_version(optimizer, start, new, [gradient.bfloat16()], 2, PiecePool(0), StoreTimes(), raised)
    assert torch.equal(new, torch.full((32,), -0.5))


@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), True),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, maximize=True), False),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, fused=True), False),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, foreach=True), False),
        (torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1), False),
    ],
    ids=["plain", "maximize", "fused", "foreach", "adam"],
)
def test_what_counts_as_plain(optimizer: torch.optim.Optimizer, plain: bool) -> None:
    assert is_plain_sgd(optimizer) is plain
