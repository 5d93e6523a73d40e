"""From the bytes of a dump to a ``Recording``: pickle and JSON, formats 2.3 to 2.10, and any 2.x that is like these.

The formats differ by what they leave out, so a field that is not there has its default. What decides is typed here,
and every text is filtered: a dump comes from somebody else's job. Known differences:

- JSON has 0 for a time that is not known, no stacks, and no ``entries`` where there
  are none; a pickle has None, and pairs as tuples.
- 2.3 and 2.4 have neither threads nor the version of the library; 2.7 has ``nccl_version``, 2.10 threads and
  ``comm_lib_version``. (2.3, 2.4 and 2.7 by their sources only; 2.10 was seen from torch 2.11, 2.13 and 2.15. No
  source of 2.5, 2.6, 2.8 or 2.9 was seen.)
- gloo writes one group without a name, and without ranks; from torch 2.15 with those of the group that was made last,
  counted within it, so these are left out.
- ``pg_status`` is not used: gloo counts sends in it, NCCL was seen to lag behind its own entries.
- Of a batch of sends and receives NCCL completes none but a record of its own, ``coalesced``, which says that it is a
  collective, and has the number of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from sys import intern
from typing import Any, Final, TypeVar

from lockstep.flight import phrases
from lockstep.flight.plain_pickle import PickleRefused, read_plain_pickle
from lockstep.flight.recording import CallState, RecordedCall, Recording, StackLine, Tensors
from lockstep.foreign import JsonError, plain, read_json

MAX_BYTES: Final = 64 << 20
"""20,000 calls with their stacks take less than half."""
MAX_CALLS: Final = 1 << 15
MAX_PARTS: Final = 1 << 21
"""Sizes, dtypes and frames in one dump; in a pickle a small list may be used any number of times."""
MAX_RANK: Final = 1 << 17
_MAX_VALUES: Final = 1 << 22
_MOST: Final = 1 << 63
_LONGEST: Final = 300
_PICKLE: Final = b"\x80"
_MAJOR: Final = "2"
_BATCH: Final = "coalesced"


_Kept = TypeVar("_Kept")


class DumpError(ValueError):
    """This is not a readable dump; the text continues "it is ignored: "."""


def could_be_dump(head: bytes) -> bool:
    """Whether a file that begins so may be one; most files of a folder are something else."""
    return head[:1] == _PICKLE or head.lstrip()[:1] == b"{"


def read_dump(data: bytes, rank: int, taken: float = 0.0) -> Recording:
    """The recording in these bytes; ``DumpError`` if there is none."""
    if len(data) > MAX_BYTES:
        raise DumpError(phrases.dump_too_long(MAX_BYTES))
    try:
        fields = read_plain_pickle(data) if data[:1] == _PICKLE else read_json(data, MAX_BYTES, values=_MAX_VALUES)
    except (PickleRefused, JsonError) as error:
        raise DumpError(phrases.dump_unreadable(str(error))) from error
    if not isinstance(fields, dict) or "pg_config" not in fields or not isinstance(fields.get("version"), str):
        raise DumpError(phrases.no_dump())
    version = plain(fields["version"], 20)
    if version.partition(".")[0] != _MAJOR:
        raise DumpError(phrases.dump_of_another_format(version))
    return _Reader().recording(fields, rank, version, taken)


class _Reader:
    """Counts what it has made, and stops where a dump makes too much."""

    def __init__(self) -> None:
        self._left = MAX_PARTS
        self._known: dict[object, Any] = {}
        """Most calls have the sizes and the stack of another; they are kept once."""

    def recording(self, fields: Mapping[Any, Any], rank: int, version: str, taken: float) -> Recording:
        entries = fields.get("entries", [])
        if not isinstance(entries, list):
            raise DumpError(phrases.no_dump())
        if len(entries) > MAX_CALLS:
            raise DumpError(phrases.too_many_calls(MAX_CALLS))
        calls = sorted(map(self._call, entries), key=lambda call: call.record)
        return Recording(
            rank=rank,
            version=version,
            calls=tuple(_batches_ended(list(_batches_marked(calls)))),
            members=self._members(fields.get("pg_config")),
            taken=taken,
        )

    def _call(self, entry: object) -> RecordedCall:
        if not isinstance(entry, dict) or not _is_whole(entry.get("collective_seq_id")):
            raise DumpError(phrases.call_without_number())
        group, description = _pair(entry.get("process_group"))
        backend, _, operation = _text(entry.get("profiling_name")).partition(":")
        operation, source, target = _between(operation or backend)
        return RecordedCall(
            record=_whole(entry.get("record_id")),
            group=group,
            description=description,
            backend=backend,
            operation=operation,
            number=_whole(entry["collective_seq_id"]),
            p2p=entry.get("is_p2p") is True,
            p2p_number=_whole(entry.get("p2p_seq_id")),
            source=source,
            target=target,
            inputs=self._tensors(entry.get("input_sizes"), entry.get("input_dtypes")),
            outputs=self._tensors(entry.get("output_sizes"), entry.get("output_dtypes")),
            state=_state(entry.get("state")),
            retired=entry.get("retired") is True,
            created=_whole(entry.get("time_created_ns")) / 1e9,
            timeout=_whole(entry.get("timeout_ms")) / 1e3,
            stack=self._stack(entry.get("frames")),
        )

    def _tensors(self, sizes: object, dtypes: object) -> Tensors:
        shapes = tuple(tuple(_whole(one) for one in self._list(size)) for size in self._list(sizes))
        return self._once(Tensors(shapes, tuple(_text(dtype) for dtype in self._list(dtypes))))

    def _stack(self, frames: object) -> tuple[StackLine, ...]:
        return self._once(
            tuple(
                self._once(StackLine(_text(one.get("name")), _text(one.get("filename")), _whole(one.get("line"))))
                for one in self._list(frames)
                if isinstance(one, dict)
            )
        )

    def _once(self, value: _Kept) -> _Kept:
        kept: _Kept = self._known.setdefault(value, value)
        return kept

    def _members(self, config: object) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, group in config.items() if isinstance(config, dict) else ():
            ranks = self._ranks(group.get("ranks")) if isinstance(group, dict) else ()
            if isinstance(name, str) and name and ranks:
                found[_text(name)] = ranks
        return found

    def _ranks(self, written: object) -> tuple[int, ...]:
        """``"[0, 1]"``, as every format has it, or a list."""
        words = written.strip("[] ").split(",") if isinstance(written, str) else self._list(written)
        self._count(len(words))
        numbers = [_whole(int(one) if isinstance(one, str) and _is_number(one) else one, -1) for one in words]
        return tuple(numbers) if all(0 <= number < MAX_RANK for number in numbers) else ()

    def _list(self, value: object) -> Sequence[Any]:
        found = value if isinstance(value, list | tuple) else ()
        self._count(len(found))
        return found

    def _count(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise DumpError(phrases.too_many_parts())


def _batches_marked(calls: Sequence[RecordedCall]) -> Iterator[RecordedCall]:
    """The same with the record of a batch of sends and receives among these."""
    sent: dict[str, int] = {}
    """The number of the group's last call, where that was a send or receive."""
    for call in calls:
        closing = call.operation == _BATCH and sent.get(call.group) == call.p2p_number
        if call.p2p:
            sent[call.group] = call.p2p_number
        else:
            sent.pop(call.group, None)
        yield replace(call, p2p=True) if closing else call


def _batches_ended(calls: Sequence[RecordedCall]) -> Iterator[RecordedCall]:
    """The same with all parts of a batch ended where its own record is."""
    ended = {_batch_of(call) for call in calls if call.over}
    for call in calls:
        whole = not call.over and _batch_of(call) in ended
        yield replace(call, state=CallState.COMPLETED) if whole else call


def _batch_of(call: RecordedCall) -> tuple[str, str, bool, int]:
    return call.group, call.backend, call.p2p, call.p2p_number if call.p2p else call.number


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def _whole(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and _is_whole(value) else default


def _is_number(text: str) -> bool:
    return text.strip().isdecimal() and len(text) < 20


def _text(value: object) -> str:
    return intern(plain(value, _LONGEST)) if isinstance(value, str) else ""


def _pair(value: object) -> tuple[str, str]:
    """Name and description of a group."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return _text(value[0]), _text(value[1])
    return _text(value), ""


def _state(value: object) -> CallState:
    return next((state for state in CallState if state == value), CallState.SCHEDULED)


def _between(operation: str) -> tuple[str, int, int]:
    """``send 1->2`` and ``recv 2<-1`` both go from 1 to 2."""
    name, _, ranks = operation.partition(" ")
    for arrow, order in (("->", 1), ("<-", -1)):
        ends = ranks.split(arrow)
        if len(ends) == 2 and all(_is_number(end) for end in ends):
            source, target = [int(end) for end in ends][::order]
            return name, source, target
    return operation, -1, -1
