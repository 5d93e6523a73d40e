"""What the tests of Kubernetes need besides .venv: ``make test-engines`` installs it, and fails where it is missing."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

ENGINE = (
    pytest.mark.engine,
    pytest.mark.skipif(not os.environ.get("LOCKSTEP_ENGINES"), reason="make test-engines installs what this needs"),
)


def module(name: str, package: str) -> ModuleType:
    """A module of a package that only these tests need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.fail(f"{package} is not installed here ({error})", pytrace=False)
