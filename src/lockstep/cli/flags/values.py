"""Turns the text of a flag's value into the value; unreadable text raises one sentence with the remedy."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable

from lockstep.cli.flags.flag import Flag, FlagKind, Value

TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})

_ALIKE = 0.6
"""From this similarity on (0 to 1), a word may be a typo for another."""
_AS_GOOD = 0.1
"""Words at most this much less similar than the best one are still worth naming."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


class BadValue(ValueError):  # noqa: N818 - reads as the fact it states
    """A value that its flag cannot take; the text is the sentence for the user."""


def read_value(flag: Flag, text: str) -> Value:
    """The value that ``text`` means for this flag."""
    return _READERS[flag.kind](flag, unquoted(text))


def unquoted(text: str) -> str:
    """The text without the pair of quotes that a job file or a shell without quoting rules leaves around a value."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known words most similar to this one, best first, ignoring case and the difference of '-' and '_'."""
    plain = word.lower().replace("-", "_")
    names = sorted(set(known) - {""})
    likeness = {name: difflib.SequenceMatcher(None, plain, name.lower()).ratio() for name in names}
    best = max(likeness.values(), default=0.0)
    if best >= _ALIKE:
        names = [name for name in names if likeness[name] >= best - _AS_GOOD]
    else:
        names = [name for name in names if len(plain) >= 3 and plain in name.lower()]
    return sorted(names, key=lambda name: -likeness[name])[:count]


def did_you_mean(words: list[str]) -> str:
    """``did you mean a, b or c?``"""
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f"did you mean {listed}?"


def _text(flag: Flag, text: str) -> Value:
    return text if text or flag.default is not None else None


def _whole(flag: Flag, text: str) -> Value:
    if not _WHOLE.fullmatch(text):
        raise BadValue(f"--{flag.name}={text} is not a whole number; write one, for example --{flag.name}=1.")
    return int(text)


def _number(flag: Flag, text: str) -> Value:
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise BadValue(f"--{flag.name}={text} is not a number; write one, for example --{flag.name}=0.5.")
    return float(text)


def _switch(flag: Flag, text: str) -> Value:
    word = text.lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise BadValue(f"--{flag.name}={text} is neither true nor false; write --{flag.name} or --no{flag.name}.")


def _choice(flag: Flag, text: str) -> Value:
    for choice in flag.choices:
        if choice.lower() == text.lower():
            return choice
    for choice, reason in flag.refused_choices:
        if choice.lower() == text.lower():
            raise BadValue(f"--{flag.name}={choice} is refused: {reason}")
    known = [choice for choice in flag.choices if choice]
    alike = nearest(text, known, count=1)
    remedy = f"{did_you_mean(alike)} Known" if alike else "use one of"
    raise BadValue(f"--{flag.name}={text} is not known; {remedy}: {', '.join(known)}.")


def _list(_flag: Flag, text: str) -> Value:
    return tuple(entry.strip() for entry in text.split(",")) if text else ()


_READERS: dict[FlagKind, Callable[[Flag, str], Value]] = {
    FlagKind.TEXT: _text,
    FlagKind.SECRET: _text,
    FlagKind.WHOLE: _whole,
    FlagKind.NUMBER: _number,
    FlagKind.SWITCH: _switch,
    FlagKind.CHOICE: _choice,
    FlagKind.HOSTS: _list,
    FlagKind.LIST: _list,
}
