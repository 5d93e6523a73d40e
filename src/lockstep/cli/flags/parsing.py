"""Turns the arguments of a command line into the flags that were given.

argparse is not used: it reads ``--flag False`` as a value or a stray argument depending on declarations, has no
``--noflag=`` form, accepts prefixes of names, and prints its own error messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.cli.flags.flag import Flag, FlagKind, Status, Value, value_text
from lockstep.cli.flags.values import FALSE_WORDS, TRUE_WORDS, BadValue, did_you_mean, nearest, read_value, unquoted


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as the user gave it: ``spelling`` is the name that was typed."""

    flag: Flag
    spelling: str
    value: Value

    @property
    def asks_for_something(self) -> bool:
        """Whether it differs from the default."""
        return self.value != self.flag.default

    def argument(self) -> str:
        """An argument that is read as this flag with this value."""
        text = value_text(self.value)
        return f"--{self.flag.name}={text}" if unquoted(text) == text else f"--{self.flag.name}='{text}'"

    def __str__(self) -> str:
        """For messages: as the user wrote it, except for secrets."""
        shown = "..." if self.flag.kind is FlagKind.SECRET else value_text(self.value)
        return f"--{self.spelling}={shown}"


@dataclass(slots=True)
class CommandLine:
    """A parsed command line: the flags by stored name, one sentence per mistake, the help asked for.

    ``flags`` is the table by name. ``help_on`` is the topic of the requested help, empty for the short help.
    """

    flags: Mapping[str, Flag]
    command: str = "bench"
    given: dict[str, Given] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    help_on: str | None = None

    def gives(self, name: str) -> bool:
        """Whether a flag was given with a value other than its default."""
        return name in self.given and self.given[name].asks_for_something

    def notices(self) -> Iterator[str]:
        """One sentence per flag that was given and does nothing here."""
        for given in self.given.values():
            if given.asks_for_something and not self.has_effect(given):
                yield f"{given} has no effect here: {_why_without_effect(given.flag)}"

    def has_effect(self, given: Given) -> bool:
        """Whether this flag changes anything, given the others."""
        flag = given.flag
        if flag.only_with is not None and self.value(flag.only_with[0]) not in flag.only_with[1]:
            return False
        return flag.status is Status.WORKS

    def value(self, name: str) -> Value:
        """The value that was given, or the default."""
        return self.given[name].value if name in self.given else self.flags[name].default


def _why_without_effect(flag: Flag) -> str:
    if flag.only_with is None:
        return flag.reason
    name, values = flag.only_with
    return f"it only applies with --{name}={' or '.join(values)}."


def read_command_line(argv: Sequence[str], table: Iterable[Flag], command: str = "bench") -> CommandLine:
    """Read all arguments; mistakes are collected, not raised, so that the user sees them all at once."""
    line = CommandLine({flag.name: flag for flag in table}, command)
    position = 0
    while position < len(argv):
        previous = argv[position - 1] if position else ""
        following = argv[position + 1] if position + 1 < len(argv) else None
        position += 1 + _read_word(line, argv[position], previous, following)
    return line


def _read_word(line: CommandLine, word: str, previous: str, following: str | None) -> int:
    """Read one argument; returns how many of the following arguments belonged to it."""
    if word == "-h":
        line.help_on = line.help_on or ""
        return 0
    if not word.startswith("--") or word == "--":
        line.mistakes.append(_stray(word, previous, line.flags))
        return 0
    name, equals, text = word[2:].partition("=")
    if name in ("help", "helpshort", "helpfull"):
        line.help_on = "full" if name == "helpfull" else unquoted(text).lower()
        return 0
    flag, switched_off = _find(name, line.flags)
    if flag is None:
        line.mistakes.append(_unknown(name, line.flags, line.command))
        # The value of an unknown flag is not a separate mistake.
        return int(not equals and following is not None and not following.startswith("-"))
    if flag.kind is FlagKind.SWITCH:
        _read_switch(line, flag, name, text if equals else None, switched_off)
        return 0
    if equals:
        _store(line, flag, name, text)
        return 0
    if following is None or following.startswith("--"):
        line.mistakes.append(f"--{name} needs a value; write {flag.usage()}.")
        return 0
    _store(line, flag, name, following)
    return 1


def _find(name: str, flags: Mapping[str, Flag]) -> tuple[Flag | None, bool]:
    """The flag of this name, and whether the name switches it off (``--noeval``)."""
    flag = flags.get(name)
    if flag is None and name.startswith("no"):
        opposite = flags.get(name[2:])
        if opposite is not None and opposite.kind is FlagKind.SWITCH:
            return opposite, True
    return flag, False


def _read_switch(line: CommandLine, flag: Flag, name: str, text: str | None, off: bool) -> None:
    if off and text is not None:
        line.mistakes.append(f"--{name}={text} has both 'no' and a value; write --{name} or --{flag.name}={text}.")
    else:
        _store(line, flag, flag.name, text if text is not None else str(not off))


def _store(line: CommandLine, flag: Flag, spelling: str, text: str) -> None:
    try:
        value = read_value(flag, text)
    except BadValue as error:
        line.mistakes.append(str(error))
        return
    stored = line.flags[flag.same_as] if flag.same_as else flag
    given = Given(stored, spelling, value)
    earlier = line.given.get(stored.name)
    if earlier is not None and earlier.value != value:
        line.mistakes.append(f"{earlier} and {given} contradict each other; leave one of them out.")
        return
    line.given[stored.name] = given


def _stray(word: str, previous: str, flags: Mapping[str, Flag]) -> str:
    name = previous.removeprefix("--")
    flag, _off = _find(name, flags) if previous.startswith("--") else (None, False)
    if flag is not None and flag.kind is FlagKind.SWITCH and unquoted(word).lower() in TRUE_WORDS | FALSE_WORDS:
        return f"{word!r} after {previous} would be ignored; write --{flag.name}={unquoted(word)}."
    bare = word.lstrip("-").partition("=")[0]
    if word.startswith("-") and _find(bare, flags)[0] is not None:
        return f"{word!r} has one dash; flags take two: write -{word}."
    return f"{word!r} does not belong to a flag; write flags as --name=value, and lists with commas but without spaces."


def _unknown(name: str, flags: Mapping[str, Flag], command: str) -> str:
    off = name.startswith("no") and len(name) > 4
    alike = nearest(name, flags) or (nearest(name[2:], flags) if off else [])
    if alike:
        return f"there is no flag --{name}; {did_you_mean([f'--{like}' for like in alike])}"
    return f"there is no flag --{name}; 'lockstep {command} --help' lists the flags."


def check_against_table(line: CommandLine, exclusive: Iterable[tuple[str, ...]]) -> list[str]:
    """What the table itself rules out: flags that exclude each other, lack the flag they need, or are refused."""
    sentences: list[str] = []
    excluded: set[str] = set()
    for names in exclusive:
        clashing = [name for name in names if name in line.given]
        if len(clashing) > 1:
            excluded.update(clashing)
            listed = " and ".join(f"--{name}" for name in clashing)
            sentences.append(
                f"{listed} exclude each other; leave {'one' if len(clashing) == 2 else 'all but one'} out."
            )
    sentences.extend(_lacking(line))
    for name, given in line.given.items():
        if given.flag.status is Status.REFUSED and given.asks_for_something and name not in excluded:
            sentences.append(f"{given} is refused: {given.flag.reason}")
    return sentences


def _lacking(line: CommandLine) -> Iterator[str]:
    lacking: dict[str, list[str]] = {}
    for name, given in line.given.items():
        if given.flag.needs and given.asks_for_something and not line.gives(given.flag.needs):
            lacking.setdefault(given.flag.needs, []).append(f"--{name}")
    for needed, names in lacking.items():
        verb = "needs" if len(names) == 1 else "need"
        yield (
            f"{' and '.join(names)} {verb} --{needed}, which sets the role of this process; add "
            f"--{needed}=ps or --{needed}=worker, or run a whole cluster here with --ps=1 --workers=2 instead."
        )
