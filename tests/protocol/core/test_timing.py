"""The times that depend on each other fit together, are used, and one that no longer fits is noticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lockstep
from lockstep.protocol.core import timing

SOURCE = Path(lockstep.__file__).parent
TIMES = {name: value for name, value in vars(timing).items() if name.isupper() and isinstance(value, float)}


def names_used(file: Path) -> set[str]:
    """What a file reads of ``timing``: imported from there, and named again below."""
    tree = ast.parse(file.read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == timing.__name__
        for alias in node.names
    }
    return imported & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_no_rule_between_the_times_is_broken() -> None:
    assert timing.broken_rules() == ()


def test_every_time_is_used_by_the_code_that_it_is_for() -> None:
    used = set().union(*(names_used(file) for file in SOURCE.rglob("*.py")))
    assert not TIMES.keys() - used


def test_nobody_defines_a_time_of_this_module_again() -> None:
    again = [
        f"{file.relative_to(SOURCE)}: {target.id}"
        for file in sorted(SOURCE.rglob("*.py"))
        if file != Path(timing.__file__) and names_used(file)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in TIMES and target.id in names_used(file)
    ]
    assert not again


@pytest.mark.parametrize("name", TIMES)
def test_every_time_is_bound_by_a_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would stand alone, and belong where it is used."""
    broken: list[str] = []
    for value in (0.0, 1e6):
        monkeypatch.setattr(timing, name, value)
        broken += timing.broken_rules()
    assert broken


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("HEARTBEAT_SECONDS", 1.1, "a peer counts as unheard only after three heartbeats"),
        ("ASK_ALL_SECONDS", 0.8, "a long wait, a tick and a look keep the promise"),
        ("BOOKS_SECONDS", 1.5, "the books are published twice within the shortest wait that is reported"),
        ("HELLO_SECONDS", 31.0, "the dialer of a stream waits longer than the other end waits for its hello"),
        ("GONE_SECONDS", 60.0, "a lost task is known before the job counts as stalled"),
        ("STOP_SECONDS", 8.0, "a cluster waits longer for a monitor than the monitor for its task"),
        ("MONITOR_SECONDS", 9.0, "a cluster waits longer for what is left than for its monitors"),
        ("REPEAT_SECONDS", 3.0, "a request is repeated before it counts as lost"),
    ],
)
def test_a_time_that_no_longer_fits_is_named(
    name: str, value: float, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, name, value)
    assert rule in timing.broken_rules()
