"""Small damage to real inputs: at random places in bytes, and at random places in the values of JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

MAX_BYTES: Final = 1 << 16
"""Longer inputs are cut: what only length breaks is tested by itself, where the limits are."""

_NUMBERS: Final = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_VALUES: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e308,
        float("inf"),
        float("nan"),
        1 << 31,
        1 << 63,
        1 << 64,
        -(1 << 63),
        1 << 400,
    ),
    *("", "a", "\x00", "\x1b[31m", "../../x", "1e999", "é" * 300, [], {}, [[]], {"": None}),
)
_WORDS: Final = (
    *(b"", b"-", b"0", b"99999999999999999999", b"inf", b"nan", b"\x00", b"\n", b"\xff\xfe", b"../", b"%s", b",", b":"),
    *(b"=", b'"', b"[" * 5000, b"{" * 500, b"\x80" * 12),
)


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, changed in one to five places."""
    data = chance.choice(seeds)
    if data[:1] in b"{[" and chance.random() < 0.5:
        data = _changed_json(chance, data)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 5))):
        data = chance.choice(_CHANGES)(chance, data, seeds)[:MAX_BYTES]
    return data


Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def _place(chance: random.Random, data: bytes) -> int:
    return chance.randint(0, len(data))


def _flip(chance: random.Random, data: bytes, _seeds: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x00"
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def _overwrite(chance: random.Random, data: bytes, _seeds: Sequence[bytes]) -> bytes:
    """A number that is at the edge of its type, in any width and order."""
    width = chance.choice((1, 2, 4, 8))
    number = chance.choice(_NUMBERS) & ((1 << 8 * width) - 1)
    packed = number.to_bytes(width, "little" if chance.random() < 0.7 else "big")
    at = _place(chance, data)
    return data[:at] + packed + data[at + width :]


def _insert(chance: random.Random, data: bytes, _seeds: Sequence[bytes]) -> bytes:
    at = _place(chance, data)
    return data[:at] + chance.choice((chance.randbytes(chance.randint(1, 16)), chance.choice(_WORDS))) + data[at:]


def _remove(chance: random.Random, data: bytes, _seeds: Sequence[bytes]) -> bytes:
    first, last = sorted((_place(chance, data), _place(chance, data)))
    return data[:first] + data[min(last, first + chance.choice((1, 4, 64, 1 << 20))) :]


def _cut(chance: random.Random, data: bytes, _seeds: Sequence[bytes]) -> bytes:
    return data[: _place(chance, data)]


def _repeat(chance: random.Random, data: bytes, _seeds: Sequence[bytes]) -> bytes:
    first, last = sorted((_place(chance, data), _place(chance, data)))
    times = min(chance.choice((1, 1, 2, 30, 1000)), MAX_BYTES // (last - first + 1))
    return data[:last] + data[first:last] * times + data[last:]


def _splice(chance: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = chance.choice(seeds)
    return data[: _place(chance, data)] + other[_place(chance, other) :]


_CHANGES: Final[tuple[Change, ...]] = (_flip, _flip, _overwrite, _overwrite, _insert, _remove, _cut, _repeat, _splice)


def _changed_json(chance: random.Random, data: bytes) -> bytes:
    """The same JSON with one value replaced, removed, doubled or wrapped in a deep nest."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(_places(value))
    if not places:
        return data
    owner, key = chance.choice(places)
    kind = chance.randrange(6)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, list):
        owner.extend(owner[key : key + 1] * chance.choice((1, 50)))
    elif kind == 2:
        other, at = chance.choice(places)
        owner[key] = json.loads(json.dumps(other[at]))
    else:
        owner[key] = chance.choice(_VALUES)
    text = json.dumps(value)
    if chance.random() < 0.03:
        depth = chance.choice((100, 3000, 60_000))
        text = text.replace("null", "[" * depth + "]" * depth, 1)
    return text.encode(errors="replace")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value, without recursion."""
    left = [value]
    while left:
        one = left.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            yield one, key
            left.append(one[key])
