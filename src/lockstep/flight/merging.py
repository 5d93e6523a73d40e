"""Two recorders of one rank as one dump: torch keeps the calls of NCCL apart from those of every other library."""

from __future__ import annotations

import json
from typing import Any, Final

from lockstep.flight.reading import MAX_BYTES
from lockstep.foreign import JsonError, read_json

_MAX_VALUES: Final = 1 << 22


def merged_dumps(first: bytes, second: bytes) -> bytes:
    """Both dumps (JSON) as one, with the calls in the order in which they were made; one of them where the other has no
    calls, or cannot be read."""
    of_first, of_second = _fields(first), _fields(second)
    if not of_second.get("entries"):
        return first or second
    if not of_first.get("entries"):
        return second
    entries = sorted([*of_first["entries"], *of_second["entries"]], key=lambda entry: _number(entry, "time_created_ns"))
    lost = sum(min(_number(entry, "record_id") for entry in one["entries"]) for one in (of_first, of_second))
    numbered = [{**entry, "record_id": lost + place} for place, entry in enumerate(entries)]
    groups = {**_dictionary(of_first.get("pg_config")), **_dictionary(of_second.get("pg_config"))}
    return json.dumps({**of_first, "pg_config": groups, "entries": numbered}).encode()


def _fields(dump: bytes) -> dict[str, Any]:
    """Of a dump whose calls are objects; the reader of the merged one judges all the rest."""
    try:
        fields = _dictionary(read_json(dump, MAX_BYTES, values=_MAX_VALUES)) if dump else {}
    except JsonError:
        return {}
    entries = fields.get("entries", [])
    return fields if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries) else {}


def _dictionary(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) else 0
