"""The part of ``make audit`` that needs no network: what the sources must not contain, and whether every dependency is
used, pinned and locked. Prints one line per finding.

  python -m tools.audit
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.lock import constraints, locked

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = ROOT / "src"

FORBIDDEN_CALLS: Final = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "tempfile.mktemp", "torch.load", "yaml.load"),
}
FORBIDDEN_MODULES: Final = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "yaml"}
ALLOWED_MODULES: Final = {
    "lockstep/benchmark/data/cifar.py": {"pickle"},
    "lockstep/flight/plain_pickle.py": {"pickle"},
    "lockstep/ray/program.py": {"cloudpickle"},
    "lockstep/ray/running.py": {"cloudpickle"},
}
"""CIFAR-10 is published as pickles, and torch dumps its flight recorder so; both read plain values only and refuse
every name. On Ray, functions and results travel as Ray's own pickles, between a user's driver and actors."""
ALLOWED_CALLS: Final = {"lockstep/runtime/monitor/spare.py": {"compile", "exec"}}
"""A spare runs the file that the user's own command names, as the interpreter would."""
FORBIDDEN_ARGUMENTS: Final = {"shell", "allow_pickle"}
"""Arguments that nobody may set to anything but False."""

IMPORTED_AS: Final = {
    "google-crc32c": "google_crc32c",
    "grpcio": "grpc",
    "grpcio-tools": "grpc_tools",
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
}
NOT_IMPORTED: Final = {
    "mypy": "make types",
    "nixl-cu12": "loaded by transports/ucx/agent.py, whichever of the two is there",
    "nixl-cu13": "the same for CUDA 13",
    "py-spy": "a program that the monitor starts",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "make lint",
    "setuptools": "builds the package",
    "types-psutil": "read by mypy",
    "mkdocs-material": "make docs",
    "mkdocstrings": "make docs",
}
NOT_LOCKED: Final = frozenset({"mkdocs-material", "mkdocstrings", "nixl-cu13", "ray"})
"""Of extras that `make` installs in an environment of their own, or not at all; constraints.txt has their versions."""


def main() -> int:
    found = [*code_findings(SOURCES), *dependency_findings()]
    for line in found:
        print(line)
    print(f"{len(found)} finding(s) in the sources and the dependencies")
    return 1 if found else 0


def code_findings(sources: Path) -> list[str]:
    """Calls and imports with which data would become code, by file and line."""
    return [
        f"{file.relative_to(sources)}:{line}: {what}"
        for file in sorted(sources.rglob("*.py"))
        for line, what in _forbidden(ast.parse(file.read_text()), _allowed_in(str(file.relative_to(sources))))
    ]


def _allowed_in(file: str) -> set[str]:
    return ALLOWED_MODULES.get(file, set()) | ALLOWED_CALLS.get(file, set())


def _forbidden(tree: ast.AST, allowed: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{of}{alias.name}" for alias in node.names):
                if not (FORBIDDEN_MODULES - allowed).isdisjoint(name.split(".")):
                    yield node.lineno, f"imports {name}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS - allowed:
                yield node.lineno, f"calls {called}"
            for keyword in node.keywords:
                harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_ARGUMENTS and not harmless:
                    yield node.lineno, f"calls {called} with {keyword.arg}={ast.unparse(keyword.value)}"


def dependency_findings() -> list[str]:
    """Dependencies that nothing imports, and those that constraints.txt or locks/ do not agree about."""
    asked = dependencies()
    imported = _imported()
    found = [
        f"pyproject.toml: nothing imports {name}; remove it, or say in tools/audit.py what uses it"
        for name in sorted(asked - NOT_IMPORTED.keys())
        if IMPORTED_AS.get(name, name.replace("-", "_")) not in imported
    ]
    pins = constraints()
    have = locked("packages") | locked("torch")
    found += [f"locks: {name} is missing; run 'make lock'" for name in sorted(asked - have.keys() - NOT_LOCKED)]
    found += [
        f"locks: {name} is {version}, but {pins.get(name, 'nothing')} in constraints.txt; run 'make lock'"
        for name, version in have.items()
        if pins.get(name) != version
    ]
    return found


def dependencies() -> set[str]:
    """Every distribution that pyproject.toml names, other than this one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}
    return names - {project["name"]}


def _imported() -> set[str]:
    """Every module that any file imports or names, with the packages it is in."""
    found: set[str] = set()
    for folder in ("src", "tests", "bench", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
                    names = [node.value]  # importorskip, or python -m
                else:
                    continue
                for name in names:
                    parts = name.split(".")
                    found.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return found


if __name__ == "__main__":
    sys.exit(main())
