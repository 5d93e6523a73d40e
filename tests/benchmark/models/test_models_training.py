"""Models learn: gradients reach every parameter, seeds decide every weight."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.benchmark.models import build_model, dataset_classes, find_model
from lockstep.benchmark.models.alexnet import alexnet_cifar
from lockstep.benchmark.models.inception3 import inception3
from lockstep.benchmark.models.layers import (
    Branches,
    CentringBatchNorm2d,
    batch_norm,
    conv,
    linear,
    truncated_normal_,
)
from lockstep.benchmark.models.loss import classification_loss, main_logits
from lockstep.benchmark.models.nasnet import NasNet, nasnet_cifar
from lockstep.benchmark.models.resnet_cifar import Shortcut

IMAGENET_FAMILIES = (
    *("trivial", "lenet", "alexnet", "overfeat", "vgg11", "googlenet", "inception3", "inception4"),
    *("resnet50", "resnet50_v1.5", "resnet50_v2", "mobilenet", "nasnet", "nasnetlarge"),
)
CIFAR_FAMILIES = ("trivial", "alexnet", "resnet20", "resnet20_v2", "densenet40_k12", "nasnet")
FAMILIES = [("imagenet", name) for name in IMAGENET_FAMILIES] + [("cifar10", name) for name in CIFAR_FAMILIES]
"""One of each family: deeper ones repeat its blocks."""


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "name"), FAMILIES)
def test_backward_reaches_every_parameter_at_full_size(dataset: str, name: str) -> None:
    spec = find_model(name, dataset)
    classes = dataset_classes(dataset)
    with torch.device("meta"):
        model = spec.build(classes)
        pictures = torch.empty(2, spec.input_channels, spec.image_size, spec.image_size)
        labels = torch.empty(2, dtype=torch.int64)
    output = model(pictures)
    assert main_logits(output).shape == (2, classes)
    classification_loss(output, labels).backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert {type(layer) for layer in layers} <= {nn.Conv2d, nn.Linear}, "buckets know plain layers only"


@pytest.mark.parametrize(
    ("dataset", "name", "side"),
    [
        ("imagenet", "trivial", 227),
        ("imagenet", "lenet", 28),
        ("imagenet", "alexnet", 227),
        ("imagenet", "googlenet", 64),
        ("imagenet", "inception3", 107),
        ("imagenet", "inception4", 107),
        ("imagenet", "resnet50", 64),
        ("imagenet", "resnet50_v1.5", 64),
        ("imagenet", "resnet50_v2", 64),
        ("imagenet", "mobilenet", 64),
        ("imagenet", "nasnet", 64),
        ("cifar10", "trivial", 32),
        ("cifar10", "alexnet", 32),
        ("cifar10", "resnet20", 32),
        ("cifar10", "resnet20_v2", 32),
        ("cifar10", "densenet40_k12", 32),
        ("cifar10", "nasnet", 16),
    ],
)
def test_gradients_are_finite_and_none_is_zero(dataset: str, name: str, side: int) -> None:
    torch.manual_seed(3)
    model = build_model(name, dataset, dataset_classes(dataset))
    pictures = torch.randn(4, 3, side, side)
    loss = classification_loss(model(pictures), torch.arange(4))
    # A fresh network knows nothing: its loss is not far from that of a blind guess.
    assert loss.item() == pytest.approx(math.log(dataset_classes(dataset)), rel=0.5)
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize(
    ("dataset", "name"), [("imagenet", "lenet"), ("cifar10", "resnet20_v2"), ("cifar10", "nasnet")]
)
def test_the_seed_decides_every_weight(dataset: str, name: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return build_model(name, dataset, 11).state_dict()

    first, again, other = weights(7), weights(7), weights(8)
    assert list(first) == list(again)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.fixture
def _fresh_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_fresh_memory_holds_nan")
@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        *(("imagenet", name) for name in ("trivial", "lenet", "googlenet", "inception3", "mobilenet", "nasnet")),
        *(("imagenet", name) for name in ("resnet50", "resnet50_v2")),
        *(("cifar10", name) for name in CIFAR_FAMILIES),
    ],
)
def test_every_number_of_a_fresh_model_is_initialised(dataset: str, name: str) -> None:
    for key, value in build_model(name, dataset, 11).state_dict().items():
        assert value.isfinite().all(), key


def test_an_auxiliary_head_answers_in_training_only_and_weighs_four_tenths() -> None:
    with torch.device("meta"):
        model = inception3(11, auxiliary=True)
        pictures = torch.empty(2, 3, 299, 299)
    output = model(pictures)
    assert isinstance(output, tuple)
    assert [tuple(logits.shape) for logits in output] == [(2, 11), (2, 11)]
    assert isinstance(model.eval()(pictures), Tensor)


def test_the_loss_is_the_mean_cross_entropy_plus_four_tenths_of_each_auxiliary_one() -> None:
    logits, auxiliary, second = torch.randn(5, 7), torch.randn(5, 7), torch.randn(5, 7)
    labels = torch.tensor([0, 6, 2, 2, 1])

    def by_hand(scores: Tensor) -> Tensor:
        return -(scores - scores.logsumexp(1, keepdim=True))[torch.arange(5), labels].mean()

    assert classification_loss(logits, labels).item() == pytest.approx(by_hand(logits).item(), rel=1e-5)
    expected = by_hand(logits) + 0.4 * by_hand(auxiliary) + 0.4 * by_hand(second)
    assert classification_loss((logits, auxiliary, second), labels).item() == pytest.approx(expected.item(), rel=1e-5)
    assert main_logits((logits, auxiliary)) is logits


def test_the_loss_of_half_precision_logits_is_computed_in_single_precision() -> None:
    loss = classification_loss(torch.zeros(2, 1001, dtype=torch.bfloat16), torch.tensor([0, 1]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1001), rel=1e-6)


def test_truncated_normal_has_its_moments_and_never_leaves_two_deviations() -> None:
    numbers = torch.empty(200_000)
    truncated_normal_(numbers, 60.0, mean=127.0, generator=torch.Generator().manual_seed(1))
    assert 7.0 <= numbers.min() < 7.5
    assert 246.5 < numbers.max() <= 247.0
    assert numbers.mean().item() == pytest.approx(127.0, abs=0.5)
    assert numbers.std().item() == pytest.approx(60.0 * 0.8796, rel=0.01)


def test_layers_start_with_the_deviations_of_the_original() -> None:
    torch.manual_seed(1)
    assert conv(64, 128, 3).weight.std().item() == pytest.approx(math.sqrt(1 / 576), rel=0.02)
    assert linear(1000, 400).weight.std().item() == pytest.approx(0.8796 * math.sqrt(1 / 1000), rel=0.02)
    assert linear(1000, 400, before_relu=True).weight.std().item() == pytest.approx(
        0.8796 * math.sqrt(2 / 1000), rel=0.02
    )
    with_bias = conv(3, 4, 1, bias=0.1)
    assert with_bias.bias is not None
    assert torch.equal(with_bias.bias, torch.full((4,), 0.1))
    assert conv(3, 4, 1).bias is None


def test_normalisation_without_scale_learns_only_its_offset() -> None:
    norm = batch_norm(3, epsilon=1e-3, decay=0.999, scale=False)
    assert isinstance(norm, CentringBatchNorm2d)
    assert [key for key, _ in norm.named_parameters()] == ["bias"]
    pictures = torch.randn(8, 3, 5, 5, requires_grad=True)
    expected = functional.batch_norm(pictures, None, None, torch.ones(3), torch.zeros(3), True, 0.0, 1e-3)
    assert torch.allclose(norm(pictures), expected, atol=1e-6)
    norm(pictures).square().sum().backward()
    assert norm.bias.grad is not None
    assert norm.weight.grad is None


def test_branches_see_the_same_input_and_are_joined_by_channel() -> None:
    branches = Branches([nn.Identity(), nn.MaxPool2d(3, stride=1, padding=1)])
    pictures = torch.randn(2, 3, 4, 4)
    assert torch.equal(branches(pictures)[:, :3], pictures)
    assert branches(pictures).shape == (2, 6, 4, 4)


def test_response_normalisation_of_the_cifar_alexnet_follows_the_tutorials_formula() -> None:
    norm = next(layer for layer in alexnet_cifar(11) if isinstance(layer, nn.LocalResponseNorm))
    pictures = torch.rand(1, 20, 1, 1) * 100
    pixel = 10
    window = pictures[0, pixel - 4 : pixel + 5, 0, 0]
    expected = pictures[0, pixel, 0, 0] / (1.0 + 0.001 / 9.0 * window.square().sum()) ** 0.75
    assert norm(pictures)[0, pixel, 0, 0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_shortcut_of_the_cifar_resnets_has_no_parameters_and_keeps_every_other_pixel() -> None:
    shortcut = Shortcut(16, 32, stride=2)
    assert list(shortcut.parameters()) == []
    pictures = torch.randn(2, 16, 8, 8)
    shortened = shortcut(pictures)
    assert shortened.shape == (2, 32, 4, 4)
    assert torch.equal(shortened[:, 8:24], pictures[:, :, ::2, ::2])
    assert shortened[:, :8].abs().sum() == 0
    assert shortened[:, 24:].abs().sum() == 0
    assert Shortcut(16, 16, stride=1)(pictures) is pictures


class TestDropPath:
    """NASNet leaves out operations for single pictures, the more often the longer it has trained."""

    def model(self) -> NasNet:
        torch.manual_seed(5)
        return nasnet_cifar(11)

    def test_training_steps_are_counted_and_saved_with_the_model(self) -> None:
        model = self.model()
        pictures = torch.randn(2, 3, 16, 16)
        with torch.no_grad():
            model(pictures)
            model(pictures)
            model.eval()
            model(pictures)
        assert model.steps_taken.item() == 2
        assert model.state_dict()["steps_taken"].item() == 2

    def test_nothing_is_dropped_at_the_first_step(self) -> None:
        pictures = torch.randn(2, 3, 16, 16)
        with torch.no_grad():
            first, again = self.model()(pictures), self.model()(pictures)
        assert torch.equal(first, again)

    def test_operations_are_dropped_late_in_training(self) -> None:
        model = self.model()
        pictures = torch.randn(2, 3, 16, 16)
        with torch.no_grad():
            model.steps_taken.fill_(10**6)
            outputs = [model(pictures) for _ in range(2)]
            assert not torch.equal(*outputs)
            model.eval()
            assert torch.equal(model(pictures), model(pictures))
