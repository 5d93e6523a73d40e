"""Models from other packages: ``torchvision:NAME``, ``timm:NAME`` and ``package.module:factory``.

Your own factory is any callable that returns a ``torch.nn.Module``. It is called with the number of classes: by
keyword if it has a parameter ``num_classes``, as its only argument if it requires one, and without arguments if it
requires none. These optional attributes of the factory are used:
``image_size`` (224), ``input_channels`` (3), ``default_batch_size`` (32), ``default_learning_rate`` (0.005).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from lockstep.benchmark.models.catalogue import (
    LearningRate,
    UnknownModel,
    check_model_name,
    missing_package,
)
from lockstep.benchmark.models.spec import ModelSpec

_IMAGE_SIZE = 224
_BATCH_SIZE = 32
_LEARNING_RATE = 0.005
_TORCHVISION_IMAGE_SIZES = {"inception_v3": 299}
"""Models whose layers do not work with images of 224 x 224."""


def find_external(name: str) -> ModelSpec:
    """The model from another package; UnknownModel, with one sentence and a remedy, if it is not available."""
    check_model_name(name)
    package, _, model = name.partition(":")
    if package == "torchvision":
        return _torchvision(name, model)
    if package == "timm":
        return _timm(name, model)
    return _own(name, package, model)


def _torchvision(name: str, model: str) -> ModelSpec:
    models = _import(name, "torchvision.models")
    if model not in models.list_models(module=models):
        raise UnknownModel(
            f"torchvision has no classification model {model!r}; torchvision.models.list_models() lists what it has."
        )
    image_size = _TORCHVISION_IMAGE_SIZES.get(model, _IMAGE_SIZE)
    return _spec(name, image_size, lambda classes: models.get_model(model, weights=None, num_classes=classes))


def _timm(name: str, model: str) -> ModelSpec:
    timm = _import(name, "timm")
    if not timm.is_model(model):
        raise UnknownModel(f"timm has no model {model!r}; timm.list_models() lists what it has.")
    config = timm.get_pretrained_cfg(model, allow_unregistered=True)
    image_size = config.input_size[-1] if config is not None else _IMAGE_SIZE
    return _spec(name, image_size, lambda classes: timm.create_model(model, pretrained=False, num_classes=classes))


def _own(name: str, module_name: str, factory_name: str) -> ModelSpec:
    module = _import(name, module_name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise UnknownModel(
            f"Model {name!r}: module {module_name!r} has no function or class {factory_name!r}; "
            "write package.module:factory with a name that exists there."
        )
    rate = getattr(factory, "default_learning_rate", _LEARNING_RATE)
    return ModelSpec(
        name=name,
        image_size=getattr(factory, "image_size", _IMAGE_SIZE),
        default_batch_size=getattr(factory, "default_batch_size", _BATCH_SIZE),
        default_learning_rate=rate if isinstance(rate, LearningRate) else LearningRate(rate),
        build=partial(_checked, name, _bind_classes(name, factory)),
        input_channels=getattr(factory, "input_channels", 3),
    )


def _spec(name: str, image_size: int, create: Callable[[int], Any]) -> ModelSpec:
    return ModelSpec(name, image_size, _BATCH_SIZE, LearningRate(_LEARNING_RATE), build=partial(_checked, name, create))


def _import(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing == module_name or module_name.startswith(missing + "."):
            raise UnknownModel(missing_package(name, missing)) from error
        raise UnknownModel(
            f"Model {name!r}: importing {module_name!r} needs the package {missing!r}, which is not installed "
            f"here; install it with 'pip install {missing}'."
        ) from error


def _bind_classes(name: str, factory: Callable[..., Any]) -> Callable[[int], Any]:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.name == "num_classes" for parameter in parameters):
        return lambda classes: factory(num_classes=classes)
    required = [parameter for parameter in parameters if _is_required(parameter)]
    if not required:
        return lambda _classes: factory()
    if len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return lambda classes: factory(classes)
    listed = ", ".join(parameter.name for parameter in required)
    raise UnknownModel(
        f"Model {name!r}: its factory requires {listed}, but only the number of classes can be passed; "
        "give the others defaults."
    )


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _checked(name: str, create: Callable[[int], Any], num_classes: int) -> nn.Module:
    model = create(num_classes)
    if not isinstance(model, nn.Module):
        raise UnknownModel(
            f"Model {name!r}: its factory returned {type(model).__name__}, not a torch.nn.Module; "
            "return the model itself."
        )
    return model
