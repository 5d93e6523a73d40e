"""Every piece of Python in the documents compiles, and uses what Lockstep has as Lockstep has it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lockstep
import lockstep.ray
from docs.fences import ROOT, Fence, fences, of_language
from lockstep.library.job import Job

PYTHON = of_language("python")


@pytest.mark.parametrize("fence", PYTHON, ids=str)
def test_every_piece_compiles_and_uses_names_that_exist(fence: Fence) -> None:
    tree = ast.parse(_complete(fence.text))
    assert [problem for node in ast.walk(tree) for problem in problems(node)] == []


def _complete(text: str) -> str:
    """A piece may be the inside of a loop."""
    return "while True:\n" + "".join(f"    {line}\n" for line in text.splitlines()) if "break" in text else text


def problems(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "lockstep" and node.attr not in (*lockstep.__all__, "ray"):
            yield f"lockstep.{node.attr} does not exist"
        if node.value.id == "job" and not hasattr(Job, node.attr):
            yield f"job.{node.attr} does not exist"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep."):
        file = ROOT.joinpath("src", *(node.module or "").split(".")).with_suffix(".py")
        names = {
            one.name for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef | ast.ClassDef)
        }
        yield from (f"{node.module}.{alias.name} does not exist" for alias in node.names if alias.name not in names)
    elif isinstance(node, ast.Call) and (function := _ours(node.func)) is not None:
        takes = inspect.signature(function).parameters
        free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        for given in node.keywords:
            if given.arg is not None and given.arg not in takes and not free:
                yield f"{ast.unparse(node.func)} has no {given.arg}="


def _ours(called: ast.expr) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = None
    match called:
        case ast.Attribute(value=ast.Name(id="lockstep"), attr=name) if name in lockstep.__all__:
            found = getattr(lockstep, name)
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="lockstep"), attr="ray"), attr=name):
            found = getattr(lockstep.ray, name)
        case ast.Attribute(value=ast.Name(id="job"), attr=name):
            found = getattr(Job, name, None)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "lockstep.jion()",
        "lockstep.join(server=1)",
        "lockstep.ray.run(print, server=1)",
        "job.all_reduced(1)",
        "job.clip_grad_norm_(1.0, norm=2)",
        "from lockstep.integrations.accelerate import atach",
    ],
)
def test_what_does_not_exist_is_noticed(line: str) -> None:
    assert [problem for node in ast.walk(ast.parse(line)) for problem in problems(node)]


def test_whoever_is_said_to_make_or_run_a_block_exists() -> None:
    """``made by: NAME`` and ``run by: NAME`` name a test, or a command that ``make docs-test`` runs."""
    tests = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    unknown = [
        f"{fence}: {fence.mark}"
        for fence in fences()
        if fence.mark.startswith(("made by: test_", "run by: ")) and fence.mark.partition(": ")[2] not in tests
    ]
    assert unknown == []


def test_every_sample_of_output_says_what_makes_it() -> None:
    known = ("made by: test_", "made by: lockstep ", "drawing")
    assert [str(fence) for fence in of_language("text") if not fence.mark.startswith(known)] == []


def test_marks_are_those_that_somebody_reads() -> None:
    known = ("", "run", "drawing")
    odd = [f"{fence}: {fence.mark}" for fence in fences() if fence.mark not in known]
    assert [one for one in odd if not one.partition(": ")[2].startswith(("made by: ", "run by: "))] == []


def test_every_public_name_is_on_the_page_that_is_made_from_docstrings() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    named = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    for name in named:
        module, _, attribute = name.rpartition(".")
        file = Path(ROOT / "src", *module.split(".")).with_suffix(".py")
        assert f" {attribute}" in file.read_text(), f"{name} does not exist"
        if "integrations" not in name:
            assert (getattr(importlib.import_module(module), attribute).__doc__ or "").strip(), (
                f"{name} has no docstring"
            )
    shown = {name.rpartition(".")[2] for name in named}
    assert set(lockstep.__all__) - {"__version__"} <= shown
