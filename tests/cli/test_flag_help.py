"""Help teaches: short, by topic, or whole; and the documentation is the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.cli.flags import BadInput, HelpAsked, parse_bench
from lockstep.cli.flags.document import document
from lockstep.cli.flags.flag import Group, Status
from lockstep.cli.flags.table import TABLE

DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"


def _help(*argv: str) -> str:
    with pytest.raises(HelpAsked) as asked:
        parse_bench(argv, {})
    return asked.value.text


def _names(text: str) -> set[str]:
    return set(re.findall(r"--(?:\[no\])?(\w+)", text))


@pytest.mark.parametrize(
    "argv", [["--help"], ["-h"], ["--model=lenet", "--help"], ["--helpshort"], ["--nonsense", "-h"]]
)
def test_help_is_given_whatever_else_is_there(argv: list[str]) -> None:
    assert _help(*argv) == _help("--help")


def test_short_help_shows_every_flag_that_works_and_none_that_does_not() -> None:
    shown = _names(_help("--help"))
    assert {flag.name for flag in TABLE if flag.status is Status.WORKS and not flag.same_as} <= shown
    assert not shown & {flag.name for flag in TABLE if flag.status is not Status.WORKS}


@pytest.mark.parametrize("group", Group)
def test_help_on_a_topic_shows_all_its_flags(group: Group) -> None:
    assert {flag.name for flag in TABLE if flag.group is group} <= _names(_help(f"--help={group.value}"))


def test_full_help_shows_every_flag() -> None:
    assert {flag.name for flag in TABLE} <= _names(_help("--helpfull")) == _names(_help("--help=full"))


@pytest.mark.parametrize("topic", ["", *Group, "full"])
def test_help_fits_a_terminal_of_eighty_columns(topic: str) -> None:
    assert max(len(line) for line in _help(f"--help={topic}").splitlines()) <= 80


def test_help_on_an_unknown_topic_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean optimizer"):
        parse_bench(["--help=optimiser"], {})


def test_the_documentation_is_made_from_the_table() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m lockstep.cli.flags.document > docs/flags.md"


def test_the_documentation_fits_a_hundred_and_twenty_columns() -> None:
    assert max(len(line) for line in document().splitlines()) <= 120
