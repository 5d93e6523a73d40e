"""Models of other packages, resolved by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmark.runs import run
from lockstep.benchmark.models import UnknownModel, build_model, check_model_name, find_model

OWN_MODULE = """
import torch

def by_name(width=4, num_classes=2):
    return torch.nn.Linear(width, num_classes)

by_name.image_size = 64
by_name.input_channels = 1
by_name.default_batch_size = 7
by_name.default_learning_rate = 0.5

def by_position(classes):
    return torch.nn.Linear(3, classes)

def without_arguments():
    return torch.nn.Linear(3, 5)

class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.last = torch.nn.Linear(3, num_classes)

def needs_more(depth, width):
    return torch.nn.Linear(depth, width)

def no_module(num_classes):
    return [num_classes]

not_callable = 3
"""


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "package_of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(OWN_MODULE)
    (package / "broken.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "package_of_a_user"]:
        monkeypatch.delitem(sys.modules, name)
    return "package_of_a_user"


@pytest.mark.parametrize(
    ("factory", "outputs"),
    [("by_name", 9), ("by_position", 9), ("without_arguments", 5)],
)
def test_a_factory_of_ones_own_gets_the_number_of_classes(own_package: str, factory: str, outputs: int) -> None:
    model = build_model(f"{own_package}.nets:{factory}", "imagenet", 9)
    assert isinstance(model, nn.Linear)
    assert model.out_features == outputs


def test_a_class_is_a_factory_too(own_package: str) -> None:
    model = build_model(f"{own_package}.nets:Net", "imagenet", 9)
    assert model.get_submodule("last").weight.shape == (9, 3)


def test_attributes_of_the_factory_say_what_to_feed_the_model(own_package: str) -> None:
    spec = find_model(f"{own_package}.nets:by_name")
    assert (spec.name, spec.image_size, spec.input_channels) == (f"{own_package}.nets:by_name", 64, 1)
    assert (spec.default_batch_size, spec.default_learning_rate.base) == (7, 0.5)
    plain = find_model(f"{own_package}.nets:Net")
    assert (plain.image_size, plain.input_channels, plain.default_batch_size) == (224, 3, 32)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("package_of_a_user.nets:missing", ["has no function or class 'missing'"]),
        ("package_of_a_user.nets:not_callable", ["has no function or class 'not_callable'"]),
        ("package_of_a_user.nets:needs_more", ["requires depth, width", "defaults"]),
        ("package_of_a_user.nowhere:f", ["'package_of_a_user.nowhere'", "PYTHONPATH"]),
        ("package_of_a_user.broken:f", ["'a_package_nobody_has'", "pip install a_package_nobody_has"]),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused_with_a_remedy(own_package: str, name: str, words: list[str]) -> None:
    with pytest.raises(UnknownModel) as caught:
        find_model(name)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_factory_must_return_a_module(own_package: str) -> None:
    with pytest.raises(UnknownModel, match=r"returned list, not a torch\.nn\.Module"):
        build_model(f"{own_package}.nets:no_module", "imagenet", 9)


@pytest.mark.parametrize("ask", [check_model_name, find_model])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(UnknownModel, match=r"'nobody_has_this'.*pip install nobody_has_this.*PYTHONPATH"):
        ask("nobody_has_this.nets:f")


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_torchvision_and_timm_say_how_to_install_them(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = f"needs the Python package '{package}'.*install it with 'pip install {package}'"
    with pytest.raises(UnknownModel, match=expected):
        find_model(f"{package}:resnet18")


@pytest.mark.parametrize("name", [":", "a:", ":b", "a b:c", "torchvision:", "1a:b", "a:b:c"])
def test_a_malformed_name_is_told_the_three_forms(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"torchvision:NAME, timm:NAME or package\.module:factory"):
        check_model_name(name)


def test_checking_a_name_imports_nothing_of_the_package(own_package: str) -> None:
    check_model_name(f"{own_package}.nets:anything")
    assert own_package not in sys.modules


def test_a_model_of_torchvision_is_built_with_our_classes() -> None:
    pytest.importorskip("torchvision")
    spec = find_model("torchvision:resnet18")
    assert spec.image_size == 224
    model = spec.build(11).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 11)
    assert find_model("torchvision:inception_v3").image_size == 299
    with pytest.raises(UnknownModel, match="no classification model 'resnet18000'"):
        find_model("torchvision:resnet18000")


def test_a_model_of_timm_is_built_with_our_classes() -> None:
    pytest.importorskip("timm")
    spec = find_model("timm:resnet18")
    model = spec.build(11).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 11)
    assert find_model("timm:inception_v4").image_size == 299
    with pytest.raises(UnknownModel, match="timm has no model 'resnet18000'"):
        find_model("timm:resnet18000")


TORCHVISION = """
import torch

def list_models(module=None):
    assert module is not None
    return ["small"]

def get_model(name, weights, num_classes):
    assert (name, weights) == ("small", None)
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, num_classes))
"""

TIMM = """
import torch, types

def is_model(name):
    return name == "small"

def get_pretrained_cfg(name, allow_unregistered):
    return types.SimpleNamespace(input_size=(3, 96, 96))

def create_model(name, pretrained, num_classes):
    assert pretrained is False
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, num_classes))
"""


@pytest.mark.parametrize(
    ("package", "files", "size"),
    [
        ("torchvision", {"__init__.py": "", "models/__init__.py": TORCHVISION}, 224),
        ("timm", {"__init__.py": TIMM}, 96),
    ],
)
def test_a_package_in_their_place_is_asked_as_they_are_and_trains(
    package: str, files: dict[str, str], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands in for the package, so that the way to it is walked where it is not installed."""
    for name, text in files.items():
        place = tmp_path / package / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert find_model(f"{package}:small").image_size == size
        ran = run(
            base=("--device=cpu", f"--model={package}:small", "--batch_size=2", "--num_warmup_batches=0"), steps=2
        )
        assert ran.result.num_steps == 2
        assert ran.job.last_batch is not None
        assert ran.job.last_batch[0].shape == (2, 3, size, size)
        with pytest.raises(UnknownModel, match="has no"):
            find_model(f"{package}:large")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def test_a_model_of_ones_own_trains_by_its_name(own_package: str, tmp_path: Path) -> None:
    (tmp_path / own_package / "pictures.py").write_text(
        "import torch\n"
        "def make(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, num_classes))\n"
        "make.image_size = 8\n"
    )
    ran = run("--data_name=digits", base=("--device=cpu", f"--model={own_package}.pictures:make"), steps=2)
    assert sorted(ran.parameters()) == ["1.bias", "1.weight"]
    assert ran.job.worker_batch == 32
