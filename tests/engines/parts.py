"""What the tests of engines need besides .venv. ``make test-engines`` demands it; elsewhere they are skipped."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

REQUIRED = "LOCKSTEP_ENGINES_REQUIRED"
"""Set by the make target: what is missing is a failure."""


def demand(why_not: str) -> None:
    """Skip the test, or fail it, if ``why_not`` names something that is missing."""
    if not why_not:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(why_not)
    pytest.skip(why_not)


def module(name: str, package: str) -> ModuleType:
    """A module of a package that only these tests need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        demand(f"{package} is not installed ({error}); 'make test-engines' installs it")
        raise
