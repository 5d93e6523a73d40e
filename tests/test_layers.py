"""A lower layer never imports a higher one, and torch-free packages import no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "lockstep"

MAY_IMPORT = {
    "protocol": set(),
    "transports": {"protocol"},
    "runtime": {"protocol", "transports", "diagnose"},
    "diagnose": {"protocol", "transports"},
    "doctor": {"protocol", "transports", "runtime"},
    "sim": {"protocol", "diagnose"},
    "training": {"protocol", "transports", "runtime", "diagnose"},
}
FORBIDDEN = {
    "protocol": {"asyncio", "socket", "threading", "time", "random", "os", "logging", "torch", "grpc"},
    "transports": {"torch"},
    "runtime": {"torch", "nixl"},
    "diagnose": {"torch"},
    "doctor": {"torch", "grpc", "nixl", "asyncio"},
    "sim": {"torch", "grpc", "asyncio", "socket", "time"},
    "training": {"grpc", "nixl"},
}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, except for type checking only."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_what_lies_below_it_only(layer: str) -> None:
    own = {f"lockstep.{name}" for name in ("errors", "private_files", "stand_ins", "terminal", "version")} | {
        "lockstep"
    }
    for file in sorted((SOURCES / layer).rglob("*.py")):
        for name in imports(file):
            if not name.startswith("lockstep") or name in own:
                continue
            assert name.split(".")[1] in MAY_IMPORT[layer] | {layer}, f"{file.relative_to(SOURCES)} imports {name}"


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_a_layer_knows_nothing_of_what_is_not_its_own(layer: str) -> None:
    for file in sorted((SOURCES / layer).rglob("*.py")):
        for name in imports(file):
            assert name.split(".")[0] not in FORBIDDEN[layer], f"{file.relative_to(SOURCES)} imports {name}"


def test_the_rules_of_the_doctor_touch_no_machine() -> None:
    touching = {"socket", "subprocess", "threading", "time", "os", "shutil", "resource"}
    pure = [*(SOURCES / "doctor").glob("rules_*.py"), *(SOURCES / "doctor" / f"{n}.py" for n in ("analysis", "facts"))]
    for file in pure:
        assert touching.isdisjoint(name.split(".")[0] for name in imports(file)), file.name


def test_the_commands_use_the_library_and_nothing_uses_the_commands() -> None:
    doors = {Path("__init__.py"), Path("__main__.py")}  # they name what a user calls, and are imported by nobody
    for file in sorted(SOURCES.rglob("*.py")):
        path = file.relative_to(SOURCES)
        if path.parts[0] != "cli" and path not in doors:
            assert not [name for name in imports(file) if name.startswith("lockstep.cli")], path
