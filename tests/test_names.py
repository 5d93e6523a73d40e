"""One word for one thing: no two modules define a public class of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "lockstep"


def test_a_public_class_name_is_defined_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(file.relative_to(SOURCES)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
