"""Without servers any optimizer works, and sparse gradients too: with the bits of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from library.both_shapes import SERVED, run_in
from library.same_loop import plain, small_model
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.protocol.core.ids import ClusterShape
from lockstep.training.ranks.sparse import gathered, lacks_all, spread

pytestmark = pytest.mark.timeout(120)
STEPS = 4


class OwnAdam(torch.optim.Adam):
    """A subclass of the program's."""


class Signs(torch.optim.Optimizer):
    """A class of the program's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


MAKERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "Adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.01)],
    "Muon": lambda m: [torch.optim.Muon(matrices(m), lr=0.01), torch.optim.AdamW(rest(m), lr=0.01)],
    "a subclass": lambda m: [OwnAdam(m.parameters(), lr=0.01)],
    "a class of one's own": lambda m: [Signs(m.parameters(), lr=0.01)],
}


def mean_of(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """As one process makes it: in the order of ranks; what only some have counts as zero for the others."""
    there = [gradient.coalesce() if gradient.is_sparse else gradient for gradient in gradients if gradient is not None]
    if not there:
        return None
    total = there[0]
    for gradient in there[1:]:
        total = (total + gradient).coalesce() if total.is_sparse else total + gradient
    return total / len(gradients)


Compute = Callable[[Any, int, int], None]


def in_one_process(make_model: Any, make: Any, compute: Compute, ranks: int) -> list[Tensor]:
    model = make_model()
    optimizers = make(model)
    for step in range(STEPS):
        gradients: list[list[Tensor | None]] = []
        for rank in range(ranks):
            model.zero_grad()
            compute(model, rank, step)
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter, *of_ranks in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = mean_of(of_ranks)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def on_ranks(make_model: Any, make: Any, compute: Compute, ranks: int) -> list[list[Tensor]]:
    found: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        model = make_model()
        optimizers = make(model)
        job.wrap(model, optimizers)
        for step in job.steps(STEPS):
            model.zero_grad()
            compute(model, job.worker, step)
            for optimizer in optimizers:
                optimizer.step()
        found[job.worker] = [p.detach() for p in model.parameters()]

    run_in(ClusterShape(0, ranks), body)
    return list(found.values())


def assert_same(make_model: Any, make: Any, compute: Compute, ranks: int = 2) -> None:
    expected = in_one_process(make_model, make, compute, ranks)
    for mine in on_ranks(make_model, make, compute, ranks):
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


@pytest.mark.parametrize("kind", MAKERS)
def test_an_optimizer_that_no_server_could_run_has_the_bits_of_one_process(kind: str) -> None:
    assert_same(small_model, MAKERS[kind], plain)


# -- sparse gradients --


WORDS = nn.Sequential(nn.Embedding(12, 16, sparse=True), nn.Linear(16, 16))


def words() -> Any:
    return copy.deepcopy(WORDS)


def read(model: Any, rank: int, step: int) -> None:
    """Each rank sees other words; rank 1 sees none at all in step 2, and in step 1 one whose gradient is zero."""
    if rank == 1 and step == 2:
        model[1](torch.ones(2, 16)).sum().backward()
        return
    seen = torch.tensor([3 * rank + step, 3 * rank + step, 7])
    out = model(seen) * torch.tensor([[1.0], [1.0], [0.0 if step == 1 and rank == 1 else 2.0]])
    (out.sum() if step != 1 else (out * torch.tensor([[0.0], [0.0], [1.0]])).sum()).backward()


def sparse_adam(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SparseAdam(list(model[0].parameters())), torch.optim.SGD(model[1].parameters(), lr=0.1)]


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


@pytest.mark.parametrize("make", [sparse_adam, sgd])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sparse_gradients_are_averaged_as_in_one_process(make: Any, ranks: int) -> None:
    assert_same(words, make, read, ranks)


def test_the_mean_of_sparse_gradients_has_the_rows_of_all_ranks() -> None:
    rows: dict[int, list[int]] = {}

    def body(job: Job) -> None:
        model = words()
        job.wrap(model, sgd(model)[0])
        with job.accumulate():
            model(torch.tensor([1 + job.worker])).sum().backward()
        (model(torch.tensor([5])).sum() * 0.0).backward()
        gradient = model[0].weight.grad
        rows[job.worker] = gradient.indices()[0].tolist()
        assert gradient.is_coalesced()

    run_in(ClusterShape(0, 2), body)
    assert rows == {0: [1, 2, 5], 1: [1, 2, 5]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_of_zeros_is_a_row_and_a_row_that_nobody_has_is_none(dtype: torch.dtype) -> None:
    first, second = torch.empty(4, 2, dtype=dtype), torch.empty(4, 2, dtype=dtype)
    values = torch.tensor([[0.0, -0.0], [1.0, 2.0]], dtype=dtype)
    given = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4, 2), check_invariants=True)
    spread(given, first)
    lacks_all(second)
    second[2] = torch.tensor([-1.0, -2.0])
    mean = gathered((first + second) / 2, 1)
    assert mean.indices().tolist() == [[0, 2]]
    assert mean.values().tolist() == [[0.0, 0.0], [0.0, 0.0]]


# -- with servers --


@pytest.mark.parametrize("kind", MAKERS)
def test_with_servers_they_are_refused_with_the_remedy(kind: str) -> None:
    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, MAKERS[kind](model))

    with pytest.raises(UsageError, match="train without servers"):
        run_in(SERVED, body)


def test_with_servers_a_sparse_gradient_is_refused_with_the_remedy() -> None:
    def body(job: Job) -> None:
        model = words()
        job.wrap(model, optimizer := sgd(model)[0])
        read(model, 0, 0)
        optimizer.step()

    with pytest.raises(UsageError, match=r"'0\.weight' is sparse.*sparse=False, or train without servers"):
        run_in(SERVED, body)
