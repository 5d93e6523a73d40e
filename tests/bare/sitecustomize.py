"""Python runs this at its start where this folder is on PYTHONPATH: every phrase becomes its bare name.

What a job decides must not change by that; ``test_bare_phrases.py`` sees to it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FunctionType, ModuleType

_NAME = "phrases"


def bare(module: ModuleType) -> None:
    """Replace the public functions of a module of phrases."""
    for name, made in list(vars(module).items()):
        if isinstance(made, FunctionType) and made.__module__ == module.__name__ and not name.startswith("_"):
            setattr(module, name, _named(name))


def _named(name: str) -> object:
    def phrase(*_: object, **__: object) -> str:
        return name

    return phrase


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        bare(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of phrases as everybody does, and wraps their loader."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        parts = fullname.split(".")
        if self._busy or parts[0] != "lockstep" or _NAME not in parts[1:]:
            return None
        self._busy = True
        try:
            spec = find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
