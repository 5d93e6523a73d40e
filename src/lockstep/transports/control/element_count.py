"""Counts the elements of lists in a protobuf message without parsing it: the parser alone would take 500 MiB for the
seven million empty elements of a message of 14 MiB, and Python objects another gigabyte and half a minute.

The walk looks at one field at a time and stops at the limit, so its cost is bounded too. Bytes that it cannot follow
are left to the parser, which refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_CONTINUED: Final = bytes(range(128, 256))
"""Bytes of a number that are not its last."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field with a length that is, or may have inside, a list."""

    inner: Mapping[int, _Field] | None
    """The fields of a message that has lists somewhere."""
    width: int
    """Of each number, if it is a list of numbers in one piece; -1: it varies; 0: it is no such list."""


class _TooMany(Exception):  # noqa: N818 - ends a walk, and is caught where that began
    """More than the limit."""


class ElementCounter:
    """For one kind of message."""

    def __init__(self, descriptor: Any) -> None:
        self._fields = _fields_of(descriptor)

    def exceeds(self, data: bytes, limit: int) -> bool:
        """Whether there are more elements, or fields to be looked at, than ``limit``."""
        try:
            _walk(data, 0, len(data), self._fields, limit)
        except _TooMany:
            return True
        except IndexError:
            return False  # it ends in the middle of a field, and the parser refuses it
        return False


def _fields_of(descriptor: Any) -> dict[int, _Field]:
    found = {}
    for field in descriptor.fields:
        inner = _fields_of(field.message_type) if field.message_type is not None else {}
        width = (8 if field.type == field.TYPE_DOUBLE else -1) if field.is_packed else 0
        found[field.number] = _Field(inner if _has_lists(field.message_type) else None, width)
    return found


def _has_lists(descriptor: Any) -> bool:
    if descriptor is None:
        return False
    return any(field.is_repeated or _has_lists(field.message_type) for field in descriptor.fields)


def _walk(data: bytes, at: int, end: int, fields: Mapping[int, _Field], left: int) -> int:
    """How many more there may be after these bytes."""
    while at < end:
        left -= 1
        if left < 0:
            raise _TooMany
        tag, at = _number(data, at)
        kind = tag & 7
        if kind == _LENGTH:
            size, at = _number(data, at)
            field = fields.get(tag >> 3)
            if field is not None and field.inner is not None:
                left = _walk(data, at, min(end, at + size), field.inner, left)
            elif field is not None and field.width > 0:
                left -= size // field.width
            elif field is not None and field.width < 0:
                left -= len(data[at : at + size].translate(None, _CONTINUED))
            at += size
        elif kind == _VARINT:
            _, at = _number(data, at)
        elif kind in (_FIXED_64, _FIXED_32):
            at += 8 if kind == _FIXED_64 else 4
        else:
            raise _TooMany  # groups, which nothing of ours has: their insides cannot be counted like this
    if left < 0:
        raise _TooMany
    return left


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, the lowest first, and where it ends."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    for place in range(at + 1, at + 10):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    raise IndexError
