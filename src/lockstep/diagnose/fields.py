"""The fields of a snapshot, read without trust: what has the wrong type becomes its neutral value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from lockstep.diagnose import phrases
from lockstep.foreign import JsonError, plain, read_json

_Kind = TypeVar("_Kind", bound=StrEnum)
_Default = TypeVar("_Default")

FORMAT = 2
MAX_BYTES = 16 << 20
MAX_ITEMS = 100_000
_LARGEST = 1 << 64
"""No number of a task is larger; one that is counts as not said."""


class SnapshotError(ValueError):
    """These bytes are not a snapshot; the text is one plain sentence."""


def text_of(value: object, default: str = "") -> str:
    return plain(value) if isinstance(value, str) else default


def number_of(value: object, default: float = 0.0) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    return default


def whole_of(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST else default


def member_of(kind: type[_Kind], value: object, default: _Default) -> _Kind | _Default:
    """The member of an enum with this value; one that this version does not know must not spoil the rest."""
    try:
        return kind(value) if isinstance(value, str) else default
    except ValueError:
        return default


def object_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def objects_of(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value[:MAX_ITEMS] if isinstance(one, dict)] if isinstance(value, list) else []


def lines_of(value: object) -> tuple[str, ...]:
    return tuple(plain(str(line), 500) for line in value[:200]) if isinstance(value, list) else ()


def addresses_in(fields: Mapping[str, Any]) -> dict[str, str]:
    """The cluster as listed in a snapshot: tasks and their addresses."""
    named = object_of(fields.get("cluster"))
    items = list(named.items())[:MAX_ITEMS]
    return {plain(task): plain(address) for task, address in items if isinstance(address, str)}


def load_fields(data: bytes, kind: str) -> Mapping[str, Any]:
    if len(data) > MAX_BYTES:
        raise SnapshotError(phrases.snapshot_too_long(MAX_BYTES, len(data)))
    try:
        fields = read_json(data, MAX_BYTES)
    except JsonError as error:
        raise SnapshotError(phrases.snapshot_not_json()) from error
    if not isinstance(fields, dict) or fields.get("kind") != kind:
        raise SnapshotError(phrases.no_snapshot_of(kind))
    if fields.get("format") != FORMAT:
        raise SnapshotError(phrases.snapshot_of_another_version(fields.get("format"), FORMAT))
    return fields
