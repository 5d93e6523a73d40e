"""One reader for JSON of others, one filter for their text, and nothing in the source that goes around them."""

from __future__ import annotations

import ast
import json
import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import terminal
from lockstep.foreign import MAX_TEXT, JsonError, JsonFault, plain, plain_lines, read_json

SOURCES = Path(__file__).parents[1] / "src" / "lockstep"

READERS = {"foreign.py"}
"""The files that may call json.loads or json.load."""

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**64, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


# -- read_json --


@given(VALUES)
def test_what_json_dumps_writes_is_read_back(value: Any) -> None:
    assert read_json(json.dumps(value).encode()) == value
    assert read_json(json.dumps(value)) == value


@settings(max_examples=300)
@given(st.binary(max_size=300) | st.text(alphabet='[]{},:"\\ue0123456789.-Itrfalsn', max_size=60).map(str.encode))
def test_any_bytes_are_a_value_that_json_would_read_too_or_a_typed_error(data: bytes) -> None:
    try:
        value = read_json(data)
    except JsonError:
        return
    assert value == json.loads(data)
    assert all(math.isfinite(one) for one in numbers(value))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        yield from (one for inner in value.values() for one in numbers(inner))
    elif isinstance(value, list):
        yield from (one for inner in value for one in numbers(inner))
    elif isinstance(value, int | float):
        yield value


@given(st.integers(1, 200), st.sampled_from(["[]", "{}"]), st.text(alphabet='[]{}"\\', max_size=20))
def test_depth_is_counted_as_the_parser_would_go(deep: int, kind: str, inside: str) -> None:
    """Brackets inside of texts do not count, whatever is escaped there."""
    value: Any = inside
    for _ in range(deep):
        value = [value] if kind == "[]" else {inside: value}
    if deep <= 64:
        assert read_json(json.dumps(value)) == value
    else:
        with pytest.raises(JsonError) as raised:
            read_json(json.dumps(value))
        assert raised.value.fault is JsonFault.TOO_DEEP


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"[" * 200_000, JsonFault.TOO_DEEP),
        (b'{"a":' * 200_000, JsonFault.TOO_DEEP),
        (b"[" * 100_000 + b"]" * 100_000, JsonFault.TOO_DEEP),
        (b"[]" * 10, JsonFault.NOT_JSON),
        (b"[[[", JsonFault.NOT_JSON),
        (b"]]]", JsonFault.NOT_JSON),
        (b"NaN", JsonFault.BAD_NUMBER),
        (b"[Infinity]", JsonFault.BAD_NUMBER),
        (b"-Infinity", JsonFault.BAD_NUMBER),
        (b"1e999", JsonFault.BAD_NUMBER),
        (b"1" + b"0" * 4000, JsonFault.BAD_NUMBER),
        (b"18446744073709551616", JsonFault.BAD_NUMBER),
        (b"[" + b"{}," * (1 << 20) + b"{}]", JsonFault.TOO_MANY),
        (b" " * ((16 << 20) + 1), JsonFault.TOO_LONG),
        (b"\xff\xfe[\x00]\x00", JsonFault.NOT_JSON),
        (b"", JsonFault.NOT_JSON),
    ],
)
def test_what_would_hurt_the_reader_is_refused_by_its_kind(data: bytes, fault: JsonFault) -> None:
    with pytest.raises(JsonError) as raised:
        read_json(data)
    assert raised.value.fault is fault


def test_the_state_of_a_users_objects_may_hold_infinity() -> None:
    assert read_json('{"best": Infinity, "n": 100000000000000000000000}', any_number=True) == {
        "best": math.inf,
        "n": 10**23,
    }


# -- plain --


@given(st.text(st.characters(), max_size=200))
def test_plain_text_is_one_line_that_a_terminal_only_shows(text: str) -> None:
    shown = plain(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
    assert len(shown.splitlines()) <= 1
    assert plain(shown) == shown
    shown.encode()


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), max_size=200))
def test_what_was_plain_stays_as_it_is(text: str) -> None:
    assert plain(text) == text


@given(st.text(max_size=50), st.integers(3, 40))
def test_plain_text_has_a_bound(text: str, limit: int) -> None:
    assert len(plain(text, limit)) <= limit


def test_plain_text_has_a_bound_that_nobody_needs_to_set() -> None:
    assert len(plain("x" * 10_000_000)) == MAX_TEXT


def test_lines_of_ours_stay_lines() -> None:
    assert plain_lines(["a\x1b[2J", "b\rc"]) == "a?[2J\nb c"


def test_no_line_on_stderr_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say("first\x1b[1A\x1b[2K\nsecond\x9b2J")
    terminal.say_over("third\x07")
    assert capsys.readouterr().err == "lockstep: first?[1A?[2K\nsecond?2J\nlockstep: third?\n"


# -- the source --


def calls_of_json(tree: ast.Module) -> Iterator[int]:
    """The lines that read JSON without bounds, however the module was imported."""
    names = {"json"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "json"}
        elif isinstance(node, ast.ImportFrom) and node.module in ("json", "json.decoder"):
            yield from (node.lineno for alias in node.names if alias.name != "JSONDecodeError")
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in ("load", "loads", "JSONDecoder")
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        ):
            yield node.lineno


def test_nothing_else_reads_json() -> None:
    found = [
        f"{file.relative_to(SOURCES)}:{line}"
        for file in sorted(SOURCES.rglob("*.py"))
        if str(file.relative_to(SOURCES)) not in READERS
        for line in calls_of_json(ast.parse(file.read_text()))
    ]
    assert not found, f"these read JSON without bounds; use lockstep.foreign.read_json: {found}"


@pytest.mark.parametrize(
    "source", ["import json\njson.loads(x)", "import json as j\nj.load(f)", "from json import loads", "f(json.loads)"]
)
def test_the_search_finds_every_way_to_read_json(source: str) -> None:
    assert list(calls_of_json(ast.parse(source)))


WRITERS = {"private_files.py", "terminal.py", "transports/control/generate.py"}
NAMED_BY_A_USER = {
    "cli/compare.py": "--json",
    "cli/compare_program.py": "--json",
    "cli/net.py": "--json",
    "runtime/monitor/spare.py": "its name for ps, /proc/self/comm",
    "cli/sim_capacity.py": "--json",
    "cli/sim_replicas.py": "--json",
    "cli/sim_search.py": "--json",
    "benchmark/outputs/graph_file.py": "--graph_file",
    "benchmark/data/sample.py": "a data set in a folder that must be new",
    "drill/reading.py": "inside of the folder of the drill",
    "benchmark/compare/programs.py": "inside of a temporary folder of its own",
    "drill/cluster.py": "inside of a temporary folder of its own, or one that it has just made",
    "drill/systems.py": "the same",
    "drill/task.py": "the same",
    "runtime/local_cluster/gpu_sharing.py": "inside of a temporary folder of its own",
    "transports/verbs/provider.py": "inside of the user's private folder",
    "watch/drill_program.py": "inside of the folder of the drill",
    "watch/entry.py": "inside of a temporary folder of its own",
    "watch/injected.py": "inside of that folder; it runs where Lockstep is not installed",
}
"""Files of exactly the name that a person typed, which may be a link or a pipe of theirs; and folders of our own."""


def test_files_are_written_by_private_files_only() -> None:
    """C3: a file opened by a name that others can guess may be theirs, or a link to a file of ours."""
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        name = str(file.relative_to(SOURCES))
        if name in WRITERS or name in NAMED_BY_A_USER:
            continue
        found += [f"{name}:{line}" for line in writes(ast.parse(file.read_text()))]
    assert not found, f"these write files by themselves; use lockstep.private_files: {found}"


def writes(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [arg.value for arg in node.args[-1:] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        opens = called == "open" and any(mode[:1] in ("w", "a", "x") and len(mode) <= 3 for mode in modes)
        writes_whole = called == "write_bytes" and isinstance(node.func, ast.Attribute)
        if opens or writes_whole or called in ("write_text", "touch", "mkfifo", "mkstemp", "mktemp"):
            yield node.lineno


def test_the_search_finds_every_way_to_write_a_file() -> None:
    for source in ("open(p, 'w')", "p.open('ab')", "p.write_text(x)", "p.write_bytes(x)", "os.mkfifo(p)"):
        assert list(writes(ast.parse(source))), source
