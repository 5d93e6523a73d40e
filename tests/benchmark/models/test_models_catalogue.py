"""Names, sizes and rates of the models, and what is said about a name that does not exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.benchmark.models import (
    LearningRate,
    UnknownModel,
    check_model_name,
    dataset_classes,
    find_model,
    model_names,
)

IMAGENET_IMAGES = 1_281_167


def test_the_catalogue_is_usable_without_importing_torch() -> None:
    program = (
        "import sys\n"
        "from lockstep.benchmark.models import find_model, model_names, check_model_name\n"
        "from lockstep.benchmark.outputs import metrics\n"
        "model_names(); find_model('resnet50'); check_model_name('vgg16')\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_every_model_of_the_original_that_takes_pictures_is_there() -> None:
    assert model_names("imagenet") == (
        *("trivial", "lenet", "alexnet", "overfeat", "vgg11", "vgg16", "vgg19"),
        *("googlenet", "inception3", "inception4"),
        *("resnet50", "resnet50_v1.5", "resnet50_v2"),
        *("resnet101", "resnet101_v1.5", "resnet101_v2"),
        *("resnet152", "resnet152_v1.5", "resnet152_v2"),
        *("mobilenet", "nasnet", "nasnetlarge"),
    )
    assert model_names("cifar10") == (
        *("trivial", "alexnet", "resnet20", "resnet20_v2", "resnet32", "resnet32_v2"),
        *("resnet44", "resnet44_v2", "resnet56", "resnet56_v2", "resnet110", "resnet110_v2"),
        *("densenet40_k12", "densenet100_k12", "densenet100_k24", "nasnet"),
    )


def test_a_data_set_without_models_of_its_own_uses_those_of_imagenet() -> None:
    assert model_names("digits") == model_names("imagenet") == model_names()
    assert dataset_classes("imagenet") == 1001
    assert dataset_classes("cifar10") == 11


@pytest.mark.parametrize(
    ("name", "dataset", "image_size", "batch", "rate"),
    [
        ("trivial", "imagenet", 227, 32, 0.005),
        ("lenet", "imagenet", 28, 32, 0.005),
        ("alexnet", "imagenet", 227, 512, 0.005),
        ("overfeat", "imagenet", 231, 32, 0.005),
        ("vgg16", "imagenet", 224, 64, 0.005),
        ("inception3", "imagenet", 299, 32, 0.005),
        ("resnet50", "imagenet", 224, 64, 0.128),
        ("resnet152", "imagenet", 224, 32, 0.128),
        ("nasnetlarge", "imagenet", 331, 16, 0.005),
        ("trivial", "cifar10", 32, 32, 0.005),
        ("alexnet", "cifar10", 32, 128, 0.1),
        ("resnet110_v2", "cifar10", 32, 128, 0.1),
        ("densenet40_k12", "cifar10", 32, 64, 0.1),
        ("nasnet", "cifar10", 32, 32, 0.025),
    ],
)
def test_defaults_are_those_of_the_original(name: str, dataset: str, image_size: int, batch: int, rate: float) -> None:
    spec = find_model(name, dataset)
    assert (spec.name, spec.image_size, spec.default_batch_size) == (name, image_size, batch)
    assert spec.default_learning_rate.base == rate
    assert spec.input_channels == 3


@pytest.mark.parametrize(
    ("name", "dataset", "words"),
    [
        ("resnt50", "imagenet", ["'resnt50'", "'imagenet'", "did you mean resnet50"]),
        ("VGG16", "imagenet", ["'VGG16'", "Known models: trivial, lenet"]),
        ("resnet50", "cifar10", ["it exists only for imagenet", "resnet20_v2"]),
        ("resnet20", "imagenet", ["it exists only for cifar10"]),
        ("ssd300", "coco", ["not supported", "COCO", "classification"]),
        ("ncf", "imagenet", ["not supported", "recommends"]),
        ("deepspeech2", "librispeech", ["not supported", "speech"]),
        ("official_resnet50", "imagenet", ["--model=resnet50_v1.5"]),
        ("official_resnet101_v2", "imagenet", ["--model=resnet101_v2"]),
        ("official_resnet18", "imagenet", ["--model=resnet50_v1.5"]),
        ("", "imagenet", ["Known models"]),
    ],
)
def test_an_unknown_name_is_refused_with_a_remedy(name: str, dataset: str, words: list[str]) -> None:
    for ask in (check_model_name, find_model):
        with pytest.raises(UnknownModel) as caught:
            ask(name, dataset)
        for word in words:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_plain_rate_never_changes() -> None:
    rate = LearningRate(0.005)
    assert [rate.at(step, 32, 1000) for step in (0, 10, 10**6)] == [0.005, 0.005, 0.005]


def test_the_rate_of_resnet50_warms_up_scales_with_the_batch_and_drops() -> None:
    rate = find_model("resnet50").default_learning_rate
    steps_per_epoch = IMAGENET_IMAGES / 512
    warm_up = int(steps_per_epoch * 5)
    full = 0.128 * 512 / 256

    def at(step: int) -> float:
        return rate.at(step, 512, IMAGENET_IMAGES)

    assert at(0) == 0.0
    assert at(warm_up // 2) == pytest.approx(full * (warm_up // 2) / warm_up)
    assert at(warm_up) == full
    for epoch, before, after in ((30, 1.0, 0.1), (60, 0.1, 0.01), (80, 0.01, 0.001), (90, 0.001, 0.0001)):
        boundary = int(steps_per_epoch * epoch)
        assert at(boundary) == pytest.approx(full * before)
        assert at(boundary + 1) == pytest.approx(full * after)


def test_the_rate_of_the_cifar_resnets_ends_at_a_five_hundredth() -> None:
    rate = find_model("resnet20", "cifar10").default_learning_rate
    last_drop = int(50_000 / 128 * 300)
    assert rate.at(0, 128, 50_000) == 0.1
    assert rate.at(last_drop, 128, 50_000) == pytest.approx(0.001)
    assert rate.at(last_drop + 1, 128, 50_000) == pytest.approx(0.0002)


def test_the_rate_of_the_cifar_alexnet_falls_to_a_tenth_every_hundred_epochs() -> None:
    rate = find_model("alexnet", "cifar10").default_learning_rate
    period = int(50_000 / 128 * 100)
    assert rate.at(period - 1, 128, 50_000) == 0.1
    assert rate.at(period, 128, 50_000) == pytest.approx(0.01)
    assert rate.at(2 * period, 128, 50_000) == pytest.approx(0.001)


def test_a_data_set_smaller_than_a_batch_still_has_a_rate() -> None:
    for dataset in ("imagenet", "cifar10"):
        for name in model_names(dataset):
            rate = find_model(name, dataset).default_learning_rate
            assert 0.0 <= rate.at(7, 512, 5) < 10.0


@pytest.mark.slow
def test_a_model_is_built_without_what_torch_imports_for_compiling() -> None:
    """It takes a second, for which everybody waits when a worker comes back."""
    code = (
        "import sys, torch; from lockstep.benchmark.models.registry import build_model as build\n"
        "build('resnet20', 'cifar10', 10); build('lenet', 'imagenet', 10); print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
