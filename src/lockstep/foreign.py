"""What others say: the only reader of JSON from a peer or a file, and the only filter for text that people will see.

A peer may be broken, of another version, or somebody else's program; a file may be damaged. ``read_json`` bounds what
reading costs before it reads (bytes, depth, number of values) and accepts no number that arithmetic would choke on.
``plain`` takes out what a terminal would obey instead of showing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

MAX_BYTES: Final = 16 << 20
"""As much as one message of the control plane may bring."""
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 1 << 20
MAX_TEXT: Final = 4096
"""Longest text of a peer that is shown; a sentence has a few hundred characters."""

_WHOLE_LIMIT: Final = 1 << 64
_LONGEST_WHOLE: Final = len(str(-_WHOLE_LIMIT))


class JsonFault(StrEnum):
    """What is wrong with a text that should be JSON."""

    TOO_LONG = "too long"
    TOO_DEEP = "nested too deeply"
    TOO_MANY = "too many values"
    BAD_NUMBER = "a number that is not finite or out of range"
    NOT_JSON = "not JSON"


class JsonError(ValueError):
    """These bytes were not read; ``fault`` says why, and the text is a phrase that continues "it is not readable: "."""

    def __init__(self, fault: JsonFault, detail: str = "") -> None:
        super().__init__(f"{fault.value} ({detail})" if detail else fault.value)
        self.fault = fault


def read_json(
    data: bytes | str,
    limit: int = MAX_BYTES,
    *,
    depth: int = MAX_DEPTH,
    values: int = MAX_VALUES,
    any_number: bool = False,
) -> Any:
    """The value in this UTF-8 text of at most ``limit`` bytes; ``JsonError`` for anything else.

    ``depth``: how many lists and objects may lie inside one another; ``values``: how many there may be in all.
    ``any_number``: for the state of a user's own objects, which may well hold infinity.
    """
    if len(data) > limit:
        raise JsonError(JsonFault.TOO_LONG, f"more than {limit} bytes")
    try:
        raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
        text = data if isinstance(data, str) else data.decode()
    except UnicodeError as error:
        raise JsonError(JsonFault.NOT_JSON, error.__class__.__name__) from error
    _check_shape(raw, depth, values)
    try:
        if any_number:
            return json.loads(text)
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonError(JsonFault.NOT_JSON, plain(str(error), 200)) from error


_KEEP: Final = b"[]{},"
_REST: Final = bytes(sorted(set(range(256)) - set(_KEEP)))


def _check_shape(data: bytes, depth: int, values: int) -> None:
    """Count what would become Python objects, without making any."""
    # Without escaped characters every quote begins or ends a text. A backslash outside of texts is no JSON, and the
    # parser stops there: what follows does not matter.
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]).translate(None, _REST)
    if outside.count(b",") + outside.count(b"[") + outside.count(b"{") >= values:
        raise JsonError(JsonFault.TOO_MANY, f"more than {values}")
    brackets = outside.translate(None, b",")
    for _ in range(depth):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")  # the innermost ones
    if brackets:
        opened = brackets.count(b"[") + brackets.count(b"{")
        unbalanced = 2 * opened != len(brackets) and opened <= depth
        raise JsonError(*((JsonFault.NOT_JSON, "brackets") if unbalanced else (JsonFault.TOO_DEEP, f"over {depth}")))


def _refuse(text: str) -> float:
    raise JsonError(JsonFault.BAD_NUMBER, text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text[:40])


def _whole(text: str) -> int:
    if len(text) > _LONGEST_WHOLE:
        _refuse(f"{text[:40]}...")
    number = int(text)
    return number if abs(number) < _WHOLE_LIMIT else int(_refuse(text))


# Control characters, the ends of lines that Unicode adds, marks that reorder what follows, and halves of characters.
_GAPS: Final = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]+")
_UNSAFE: Final = re.compile(
    r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str, limit: int = MAX_TEXT) -> str:
    """One line that a terminal only shows: ends of lines become spaces, what a terminal would obey becomes ``?``."""
    if len(text) > limit:
        text = f"{text[: max(0, limit - 3)]}..."
    if text.isprintable():
        return text
    return _UNSAFE.sub("?", _GAPS.sub(" ", text))


def plain_lines(lines: Iterable[str], limit: int = MAX_TEXT) -> str:
    """The same for a text of several lines that is ours, whatever others have put into it."""
    return "\n".join(plain(line, limit) for line in lines)
