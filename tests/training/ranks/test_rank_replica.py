"""Gradients that several ranks average: bits, order, and every way in which backward may make them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.ranks import ThreadRank, run_ranks
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.ranks.averager import ModelsDiffer
from lockstep.training.ranks.rank_replica import GradientMisuse

pytestmark = pytest.mark.timeout(120)

_BUILDING = threading.Lock()
"""Ranks of these tests are threads of one process and share its random numbers."""


class Net(nn.Module):
    """Two parts, the second of which may be left out, and one layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.twice = nn.Linear(32, 32)
        self.side = nn.Linear(32, 32)
        self.never = nn.Linear(4, 4)
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor, *, side: bool = False, recompute: bool | None = None) -> Tensor:
        def middle(y: Tensor) -> Tensor:
            return torch.tanh(self.twice(y))

        y = torch.tanh(self.first(x))
        for _ in range(2):
            y = middle(y) if recompute is None else checkpoint(middle, y, use_reentrant=recompute)
        if side:
            y = y + self.side(y)
        out: Tensor = self.last(y)
        return out


def make(seed: int = 3, kind: Callable[[], nn.Module] = Net) -> Any:
    with _BUILDING:
        torch.manual_seed(seed)
        return kind()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def averaged(
    ranks: int, compute: Callable[[Any, int], None], kind: Callable[[], nn.Module] = Net
) -> list[Tensor | None]:
    """What ``ranks`` models have in ``grad``, averaged in their order; None where none of them has one."""
    models = [make(kind=kind) for _ in range(ranks)]
    for rank, model in enumerate(models):
        compute(model, rank)
    found: list[Tensor | None] = []
    for grads in zip(*(gradients(model) for model in models), strict=True):
        there = [g for g in grads if g is not None]
        zero = torch.zeros_like(there[0]) if there else None
        found.append(None if zero is None else sum((zero if g is None else g for g in grads), zero) / ranks)
    return found


def same(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    assert [one is None for one in left] == [one is None for one in right]
    for one, other in zip(left, right, strict=True):
        if one is not None and other is not None:
            assert torch.equal(one, other)


def check(compute: Callable[[Any, int], None], steps: int = 3, **options: Any) -> None:
    """With two ranks every sum is exact in any order: each step has the bits of one process."""
    expected = averaged(2, compute)

    def body(rank: ThreadRank) -> None:
        model = make(seed=rank.number)  # the chief's values count
        if rank.number == 0:
            model = make()
        replica = rank.replica(model, **options)
        for _ in range(steps):
            model.zero_grad()
            compute(model, rank.number)
            same(gradients(model), expected)
        assert replica.step == steps
        replica.close()

    run_ranks(2, body)


def test_the_mean_is_in_grad_when_backward_ends() -> None:
    check(lambda model, rank: model(batch(rank, 0)).square().mean().backward())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_a_layer_that_is_used_twice(reentrant: bool) -> None:
    def compute(model: Any, rank: int) -> None:
        inputs = batch(rank, 0).requires_grad_()
        model(inputs, recompute=reentrant).square().mean().backward()

    check(compute)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_everything_inside_a_reentrant_checkpoint() -> None:
    def compute(model: Any, rank: int) -> None:
        inputs = batch(rank, 0).requires_grad_()
        checkpoint(lambda x: model(x, recompute=True), inputs, use_reentrant=True).square().mean().backward()

    check(compute)


def test_a_layer_that_only_one_rank_uses_counts_as_zero_on_the_other() -> None:
    check(lambda model, rank: model(batch(rank, 0), side=rank == 1).square().mean().backward())


def test_a_gradient_penalty_inside_forward_does_not_end_the_step() -> None:
    def compute(model: Any, rank: int) -> None:
        inputs = batch(rank, 0).requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        (out.square().mean() + slope.square().sum()).backward()

    check(compute)


def test_two_backward_passes_are_averaged_one_after_the_other() -> None:
    def compute(model: Any, rank: int) -> None:
        model(batch(rank, 0)).square().mean().backward()
        model(batch(rank, 1)).square().mean().backward()

    expected = averaged(2, compute)

    def body(rank: ThreadRank) -> None:
        model = make()
        replica = rank.replica(model)
        for _ in range(2):
            model.zero_grad()
            compute(model, rank.number)
            for mine, theirs in zip(gradients(model), expected, strict=True):
                assert mine is None if theirs is None else torch.allclose(mine, theirs, rtol=1e-5)  # type: ignore[arg-type]
        assert replica.step == 4
        replica.close()

    run_ranks(2, body)


@pytest.mark.parametrize("keeps", [True, False])
def test_passes_that_are_not_averaged_add_up_and_the_next_one_averages_all(keeps: bool) -> None:
    """``keeps``: zero_grad leaves the memory in place, so passes accumulate where the means were."""

    def compute(model: Any, rank: int) -> None:
        for number in range(3):
            alone[rank] = number < 2
            model(batch(rank, number), side=number == 0).square().mean().backward()

    alone = [False, False]
    expected = averaged(2, compute)

    def body(rank: ThreadRank) -> None:
        model = make()
        replica = rank.replica(model, synchronises=lambda: not alone[rank.number])
        for _ in range(3):
            compute(model, rank.number)
            assert not replica.unshared
            same(gradients(model), expected)
            model.zero_grad(set_to_none=not keeps)
        assert replica.step == 3
        replica.close()

    run_ranks(2, body)


class Normed(nn.Module):
    """With statistics of each rank's own batches, and one number that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.flag: Tensor
        self.register_buffer("flag", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def test_everyone_has_the_chiefs_buffers_after_backward() -> None:
    alone = make(kind=Normed)
    for step in range(3):
        alone(batch(0, step)).sum().backward()
    found: dict[int, dict[str, Tensor]] = {}

    def body(rank: ThreadRank) -> None:
        model = make(seed=3 + rank.number, kind=Normed)
        replica = rank.replica(model)
        for step in range(3):
            model(batch(rank.number, step)).sum().backward()
        found[rank.number] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        replica.close()

    run_ranks(3, body)
    for buffers in found.values():
        for name, buffer in alone.named_buffers():
            assert torch.equal(buffers[name], buffer), name


def test_buckets_leave_while_backward_goes_on_and_in_one_order() -> None:
    order: dict[int, list[tuple[int, bool]]] = {0: [], 1: []}

    def body(rank: ThreadRank) -> None:
        model = make()
        replica = rank.replica(model)
        handed, begun = replica._averager.hand_over, [False]
        model.first.weight.register_post_accumulate_grad_hook(lambda _: begun.__setitem__(0, True))

        def note(step: int, bucket: int) -> None:
            if step == 1:
                order[rank.number].append((bucket, begun[0]))
            handed(step, bucket)

        replica._averager.hand_over = note  # type: ignore[method-assign]
        for step in range(2):
            begun[0] = False
            model(batch(rank.number, step), side=True).square().mean().backward()
        replica.close()

    run_ranks(2, body)
    assert order[0] == order[1]
    numbers = [bucket for bucket, _ in order[0]]
    assert numbers == sorted(numbers)
    assert not order[0][0][1], "the last layer's bucket waited for the first layer"


def test_ranks_that_drift_apart_are_named() -> None:
    def body(rank: ThreadRank) -> None:
        model = make()
        replica = rank.replica(model)
        for step in range(2):
            model(batch(rank.number, step)).square().mean().backward()
            if rank.number == 2:
                with torch.no_grad():
                    model.twice.bias.add_(1e-6)
        replica.close()

    with pytest.raises(JobEndedError, match=r"worker 2 has other values than worker 0 in 'twice.bias'"):
        run_ranks(3, body)


def test_another_model_is_refused_by_name() -> None:
    def body(rank: ThreadRank) -> None:
        model = make()
        if rank.number == 1:
            model.side = nn.Linear(32, 31)
        rank.replica(model)

    with pytest.raises(ModelsDiffer, match=r"side\.weight"):
        run_ranks(2, body)


def test_a_gradient_that_is_made_more_often_than_in_the_first_step_is_refused() -> None:
    def body(rank: ThreadRank) -> None:
        model = make()
        rank.replica(model)
        model(batch(0, 0)).square().mean().backward()
        model(batch(0, 0).requires_grad_(), recompute=True).square().mean().backward()

    with pytest.raises(GradientMisuse, match=r"'twice.*' 2 times in step 1, but 1 times in the first.*use_reentrant"):
        run_ranks(1, body)


def test_published_values_are_the_chiefs_and_gradients_stay() -> None:
    def body(rank: ThreadRank) -> None:
        model = make()
        replica = rank.replica(model)
        model(batch(rank.number, 0)).square().mean().backward()
        before = gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank.number)
        replica.publish()
        same(gradients(model), before)
        for mine, chiefs in zip(model.parameters(), make().parameters(), strict=True):
            assert torch.equal(mine, chiefs)
        replica.close()

    run_ranks(2, body)


def test_a_copy_of_the_model_is_an_ordinary_one() -> None:
    def body(rank: ThreadRank) -> None:
        model = make()
        replica = rank.replica(model)
        copied = copy.deepcopy(model)
        copied(batch(rank.number, 0)).square().mean().backward()
        assert replica.step == 0
        replica.close()

    run_ranks(1, body)
