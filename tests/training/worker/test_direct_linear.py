"""Linear layers that compute gradients where they leave from: the same bits, and no guess about what is not plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from lockstep.training.onednn_linear import OneDnnLinear, weight_gradient, write_weight_gradient
from lockstep.training.worker.binding import Bound, Trained
from lockstep.training.worker.direct_linear import DirectLinear, direct_linears


@dataclass
class Arena:
    """Stands where a replica stands: places for the gradients, and what came how."""

    model: nn.Module
    bound: list[Bound] = field(default_factory=list)
    layers: list[DirectLinear] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    accumulated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            place = torch.full_like(parameter, float("nan"), requires_grad=False)
            self.bound.append(Bound(Trained(name, parameter, 0), index, place, place, (0,), parameter.data))
        self.layers = direct_linears(self.model, self.bound, lambda bound: self.written.append(bound.trained.name))
        for bound in self.bound:
            bound.trained.parameter.register_post_accumulate_grad_hook(self._hook_for(bound))

    def _hook_for(self, bound: Bound) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            for layer in self.layers:
                layer.judge(bound, parameter.grad)
            bound.gradient.copy_(parameter.grad)
            parameter.grad = None
            self.accumulated.append(bound.trained.name)

        return hook

    def step(self, given: Tensor) -> dict[str, Tensor]:
        self.written.clear()
        self.accumulated.clear()
        for layer in self.layers:
            layer.begin_step()
        self.model(given).square().sum().backward()
        return {bound.trained.name: bound.gradient.clone() for bound in self.bound}


def plain_gradients(model: nn.Module, given: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(given).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def perceptron(kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(kind(37, 65), nn.ReLU(), kind(65, 129, bias=False), nn.Tanh(), kind(129, 11))


@pytest.mark.parametrize("batch", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["first layer", "inner layer"])
@pytest.mark.parametrize("kind", [nn.Linear, OneDnnLinear])
def test_gradients_have_the_bits_of_autograd(kind: type[nn.Linear], batch: int, requires_grad: bool) -> None:
    model = perceptron(kind)
    given = torch.randn(batch, 37, requires_grad=requires_grad)
    expected = plain_gradients(model, given)
    for_input = None if given.grad is None else given.grad.clone()
    arena = Arena(model)
    first, given.grad = arena.step(given), None
    second = arena.step(given)
    for name, value in expected.items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name
    assert for_input is None or torch.equal(for_input, given.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(300, 4096), (33, 40_000), (5, 7)], ids=["three pieces", "a few rows each", "one"])
@pytest.mark.parametrize("batch", [9, 513])
def test_what_onednn_makes_is_the_same_wherever_it_is_written(shape: tuple[int, int], batch: int) -> None:
    rows, columns = shape
    output_gradient, given = torch.randn(batch, rows), torch.randn(batch, columns)
    target = torch.full(shape, float("nan"))
    write_weight_gradient(output_gradient, given, target, by_onednn=True)
    assert torch.equal(target, weight_gradient(output_gradient, given, by_onednn=True))
    torch.testing.assert_close(target, output_gradient.t().mm(given), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("lent", [True, False], ids=["lent", "in the arena"])
def test_a_gradient_leaves_before_the_weight_was_read_only_where_the_weight_stays(lent: bool) -> None:
    """Where parameters arrive in the memory that the model reads, the next version may be there at once."""
    model = nn.Linear(5, 3, bias=False)
    given = torch.randn(2, 5, requires_grad=True)
    arena = Arena(model)
    weight = model.weight
    if not lent:
        arena.bound[0].value = weight.data
    arena.step(given)
    assert given.grad is not None
    expected = given.grad.clone()

    def next_version_arrives(bound: Bound) -> None:
        del bound
        weight.data.fill_(7.0)

    arena.layers[0]._on_written = next_version_arrives
    given.grad.zero_()
    arena.step(given)
    untouched = torch.equal(given.grad, expected)
    assert untouched is not lent, "what is lent may not be overwritten, and its gradient does not wait"


def test_only_the_first_step_is_copied() -> None:
    model = perceptron()
    arena = Arena(model)
    names = [name for name, _ in model.named_parameters()]
    arena.step(torch.randn(4, 37))
    assert (sorted(arena.accumulated), arena.written) == (sorted(names), [])
    arena.step(torch.randn(4, 37))
    assert (arena.accumulated, sorted(arena.written)) == ([], sorted(names))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.layer(self.layer(given))
        return result


class BorrowsWeight(nn.Module):
    """Uses its child's weight without calling it, as tied decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.layer(given) @ self.layer.weight
        return result


class ThreeDimensions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.layer(given.unsqueeze(1).expand(-1, 2, -1))
        return result


@pytest.mark.parametrize("make", [CalledTwice, BorrowsWeight, ThreeDimensions])
def test_a_weight_with_another_use_goes_the_plain_way(make: Callable[[], nn.Module]) -> None:
    model = make()
    given = torch.randn(6, 5)
    expected = plain_gradients(model, given)
    arena = Arena(model)
    for _ in range(3):
        found = arena.step(given)
        assert arena.written == []
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_weight_of_two_modules_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    assert Arena(model).layers == []


def test_restoring_leaves_the_model_as_it_was() -> None:
    model = perceptron()
    before = list(model.state_dict())
    arena = Arena(model)
    assert list(model.state_dict()) == before
    assert len(arena.layers) == 3
    for layer in arena.layers:
        layer.restore()
    assert not any("forward" in module.__dict__ for module in model.modules())
