"""Marks for some of a test's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_long(values: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Every value; those beyond ``first`` show the same once more and wait for ``make test-long``."""
    return [value if value in first else pytest.param(value, marks=pytest.mark.long) for value in values]
