"""Manifests as ``lockstep manifest kubernetes`` prints them, read back as YAML."""

from __future__ import annotations

from typing import Any

import pytest

from engines.kubernetes_parts import module
from lockstep.cli.main import main


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """The objects that the command writes."""
    assert main(["manifest", "kubernetes", *words]) == 0
    yaml = module("yaml", "PyYAML")
    return list(yaml.safe_load_all(capsys.readouterr().out))


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found
