"""Plain values as YAML, in blocks: enough for a manifest, and no dependency for one command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9/_.-]*")
_WORDS_WITH_A_MEANING = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def yaml_text(documents: Sequence[Mapping[str, object]]) -> str:
    """The documents one after the other. Values may be texts, whole numbers, booleans, and lists and maps of these."""
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            first, *rest = _lines(inner) if _has_lines(inner) else [_scalar(inner)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(key: str, value: object) -> Iterator[str]:
    if not _has_lines(value):
        yield f"{key} {_scalar(value)}"
        return
    yield key
    yield from (f"  {line}" for line in _lines(value))


def _has_lines(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _scalar(value: object) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _WORDS_WITH_A_MEANING:
        return value
    # JSON is YAML: quotes, numbers, true and false, empty lists and maps.
    return json.dumps(value)
