"""Which models exist, as plain data.

This module never imports torch, so that a process without torch (the monitor, ``lockstep --help``) can list
the models and refuse a misspelt one. Names, image sizes, batch sizes and learning rates are those of
tf_cnn_benchmarks; the layers are in one module per family, named here and imported only when a model is built.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

IMAGENET = "imagenet"
CIFAR10 = "cifar10"

_EXTERNAL_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.\-/]*")
_PACKAGES_WITH_MODELS = {"torchvision": "torchvision", "timm": "timm"}
"""Package name as written before the colon, and what pip calls it."""


class UnknownModel(ValueError):  # noqa: N818 - reads as the fact it states
    """There is no model of this name for this data set; the text says what to use instead."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A model's own learning rate, used if no other is given.

    Attributes:
        base: the rate at the start (after the warm-up).
        base_batch: the global batch that ``base`` is meant for; another batch scales the rate in proportion.
            None: the rate does not depend on the batch.
        warmup_epochs: the number of epochs over which the rate rises from 0 to its value.
        drops: (epoch, factor) pairs; after that epoch the rate is ``base * factor``.
        decay_epochs: the rate is multiplied by ``decay_factor`` once per this many epochs; 0 means never.
    """

    base: float
    base_batch: int | None = None
    warmup_epochs: float = 0.0
    drops: tuple[tuple[int, float], ...] = ()
    decay_epochs: int = 0
    decay_factor: float = 1.0

    def at(self, step: int, global_batch: int, images_per_epoch: int) -> float:
        """The rate of ``step`` (from 0) if all workers together use ``global_batch`` images per step."""
        steps_per_epoch = images_per_epoch / global_batch
        rate = self.base if self.base_batch is None else self.base * global_batch / self.base_batch
        warmup_steps = int(steps_per_epoch * self.warmup_epochs)
        if step < warmup_steps:
            return rate * step / warmup_steps
        if self.decay_epochs:
            # Counted in whole steps, and at least one: a data set smaller than a batch still decays.
            return rate * self.decay_factor ** (step // max(1, int(steps_per_epoch * self.decay_epochs)))
        factor = 1.0
        for epoch, later_factor in self.drops:
            if step > int(steps_per_epoch * epoch):
                factor = later_factor
        return rate * factor


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model for one data set.

    ``factory`` is a function of the module ``lockstep.benchmark.models.<module>``; it is called with the
    number of classes and ``arguments`` by name.
    """

    name: str
    dataset: str
    image_size: int
    default_batch_size: int
    learning_rate: LearningRate
    module: str
    factory: str
    arguments: tuple[tuple[str, object], ...] = ()


_PLAIN_RATE = LearningRate(0.005)
_RESNET_RATE = LearningRate(
    0.128, base_batch=256, warmup_epochs=5, drops=((30, 0.1), (60, 0.01), (80, 0.001), (90, 0.0001))
)
_CIFAR_RESNET_RATE = LearningRate(0.1, drops=((82, 0.1), (123, 0.01), (300, 0.002)))
_DENSENET_RATE = LearningRate(0.1, drops=((150, 0.1), (225, 0.01), (300, 0.001)))
_CIFAR_ALEXNET_RATE = LearningRate(0.1, decay_epochs=100, decay_factor=0.1)


def _imagenet(
    name: str,
    image_size: int,
    batch: int,
    factory: str,
    rate: LearningRate = _PLAIN_RATE,
    **arguments: object,
) -> CatalogueEntry:
    module, function = factory.split(".")
    return CatalogueEntry(name, IMAGENET, image_size, batch, rate, module, function, tuple(arguments.items()))


def _cifar(name: str, batch: int, factory: str, rate: LearningRate, **arguments: object) -> CatalogueEntry:
    module, function = factory.split(".")
    return CatalogueEntry(name, CIFAR10, 32, batch, rate, module, function, tuple(arguments.items()))


def _imagenet_resnets() -> Iterator[CatalogueEntry]:
    for depth in (50, 101, 152):
        batch = 64 if depth == 50 else 32
        for suffix, version in (("", "v1"), ("_v1.5", "v1.5"), ("_v2", "v2")):
            name = f"resnet{depth}{suffix}"
            yield _imagenet(name, 224, batch, "resnet.resnet", _RESNET_RATE, depth=depth, version=version)


def _cifar_resnets() -> Iterator[CatalogueEntry]:
    factory = "resnet_cifar.resnet_cifar"
    for depth in (20, 32, 44, 56, 110):
        for suffix, version in (("", "v1"), ("_v2", "v2")):
            name = f"resnet{depth}{suffix}"
            yield _cifar(name, 128, factory, _CIFAR_RESNET_RATE, depth=depth, version=version)


def _cifar_densenets() -> Iterator[CatalogueEntry]:
    for depth, growth in ((40, 12), (100, 12), (100, 24)):
        name = f"densenet{depth}_k{growth}"
        yield _cifar(name, 64, "densenet.densenet", _DENSENET_RATE, depth=depth, growth=growth)


CATALOGUE: tuple[CatalogueEntry, ...] = (
    _imagenet("trivial", 227, 32, "trivial.trivial", side=227),
    _imagenet("lenet", 28, 32, "lenet.lenet"),
    _imagenet("alexnet", 227, 512, "alexnet.alexnet"),
    _imagenet("overfeat", 231, 32, "overfeat.overfeat"),
    *(_imagenet(f"vgg{depth}", 224, 64, "vgg.vgg", depth=depth) for depth in (11, 16, 19)),
    _imagenet("googlenet", 224, 32, "googlenet.googlenet"),
    _imagenet("inception3", 299, 32, "inception3.inception3"),
    _imagenet("inception4", 299, 32, "inception4.inception4"),
    *_imagenet_resnets(),
    _imagenet("mobilenet", 224, 32, "mobilenet.mobilenet"),
    _imagenet("nasnet", 224, 32, "nasnet.nasnet_mobile"),
    _imagenet("nasnetlarge", 331, 16, "nasnet.nasnet_large"),
    _cifar("trivial", 32, "trivial.trivial", _PLAIN_RATE, side=32),
    _cifar("alexnet", 128, "alexnet.alexnet_cifar", _CIFAR_ALEXNET_RATE),
    *_cifar_resnets(),
    *_cifar_densenets(),
    _cifar("nasnet", 32, "nasnet.nasnet_cifar", LearningRate(0.025)),
)

TOKENS = "tokens"
SEQ2SEQ = CatalogueEntry("seq2seq", TOKENS, 0, 64, LearningRate(0.001), "seq2seq", "translator")
"""The only model that takes no images: it generates its own sequences of tokens, whatever the data set."""

_REFUSED = {
    "ssd300": "it finds objects in images and needs the COCO data set with its boxes; only classification "
    "models are built in",
    "ncf": "it recommends films from tables of users and ratings; only models that take images are built in",
    "deepspeech2": "it recognises speech and needs the LibriSpeech data set; only models that take images are built in",
}


def known_dataset(dataset: str) -> str:
    """The table for a data set: CIFAR-10 has its own models, all others use ImageNet's."""
    return CIFAR10 if dataset == CIFAR10 else IMAGENET


def dataset_classes(dataset: str) -> int:
    """The classes of a data set, including background class 0, which tf_cnn_benchmarks counts too."""
    return 11 if known_dataset(dataset) == CIFAR10 else 1001


def model_names(dataset: str = IMAGENET) -> tuple[str, ...]:
    """The built-in models for a data set, in the order of the catalogue."""
    table = known_dataset(dataset)
    return tuple(entry.name for entry in CATALOGUE if entry.dataset == table)


def is_external(name: str) -> bool:
    """Whether a name asks for another package's model: ``torchvision:NAME``, ``package.module:factory``."""
    return ":" in name


def find_entry(name: str, dataset: str = IMAGENET) -> CatalogueEntry:
    """The built-in model of this name; UnknownModel, with the reason and a remedy, if there is none."""
    table = known_dataset(dataset)
    for entry in (*CATALOGUE, SEQ2SEQ):
        if entry.name == name and entry.dataset in (table, TOKENS):
            return entry
    raise UnknownModel(_why_unknown(name, dataset))


def check_model_name(name: str, dataset: str = IMAGENET) -> None:
    """Refuse a name that cannot work, without importing torch or any other package."""
    if not is_external(name):
        find_entry(name, dataset)
        return
    package = name.partition(":")[0].partition(".")[0]
    if not _EXTERNAL_NAME.fullmatch(name):
        raise UnknownModel(f"Model {name!r} must have the form torchvision:NAME, timm:NAME or package.module:factory.")
    if importlib.util.find_spec(package) is None:
        raise UnknownModel(missing_package(name, package))


def missing_package(name: str, package: str) -> str:
    """The sentence for a model whose package is not installed."""
    if package in _PACKAGES_WITH_MODELS:
        remedy = f"install it with 'pip install {_PACKAGES_WITH_MODELS[package]}'"
    else:
        remedy = (
            f"install it with 'pip install {package}', or, if it is your own, "
            "put the folder that holds it on PYTHONPATH"
        )
    return f"Model {name!r} needs the Python package {package!r}, which is not installed here; {remedy}."


def _why_unknown(name: str, dataset: str) -> str:
    if name in _REFUSED:
        return f"Model {name!r} is not supported: {_REFUSED[name]}. Known models: {_listed(dataset)}."
    official = re.fullmatch(r"official_(resnet\d+)(_v2)?", name)
    if official:
        ours = official[1] + (official[2] or "_v1.5")
        known = ours if ours in model_names(dataset) else "resnet50_v1.5"
        return (
            f"Model {name!r} is not built in: tf_cnn_benchmarks takes it from another repository. "
            f"Use --model={known}, which has the same kind of layers."
        )
    elsewhere = [entry.dataset for entry in CATALOGUE if entry.name == name]
    if elsewhere:
        return (
            f"Invalid model name {name!r} for dataset {dataset!r}: "
            f"it exists only for {' and '.join(elsewhere)}. Known models: {_listed(dataset)}."
        )
    nearest = difflib.get_close_matches(name, model_names(dataset), n=3, cutoff=0.6)
    if nearest:
        return f"Invalid model name {name!r} for dataset {dataset!r}; did you mean {' or '.join(nearest)}?"
    return f"Invalid model name {name!r} for dataset {dataset!r}. Known models: {_listed(dataset)}."


def _listed(dataset: str) -> str:
    return ", ".join((*model_names(dataset), SEQ2SEQ.name))
