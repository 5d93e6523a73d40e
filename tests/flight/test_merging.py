"""Calls of NCCL and of another library in one rank: torch has a recorder for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.flight.merging import merged_dumps
from lockstep.flight.reading import read_dump

DATA = Path(__file__).parent / "data"


def one_of(folder: str) -> bytes:
    return min((DATA / folder).iterdir()).read_bytes()


def calls(dump: bytes) -> list[tuple[str, str]]:
    return [(call.backend, call.operation) for call in read_dump(dump, 0).calls]


def test_calls_of_both_recorders_are_in_the_order_in_which_they_were_made() -> None:
    gloo, nccl = one_of("gloo-slept-json"), one_of("by-hand-nccl-2.10-json")
    recording = read_dump(merged_dumps(gloo, nccl), 0)
    assert {call.backend for call in recording.calls} == {"gloo", "nccl"}
    assert len(recording.calls) == len(calls(gloo)) + len(calls(nccl))
    assert [call.created for call in recording.calls] == sorted(call.created for call in recording.calls)
    assert not recording.gaps
    assert recording.members == read_dump(nccl, 0).members


def test_a_recorder_without_calls_leaves_the_other_as_it_is() -> None:
    nccl, gloo = one_of("by-hand-nccl-2.10-json"), one_of("gloo-slept-json")
    fields: dict[str, Any] = json.loads(gloo)
    empty = json.dumps({name: value for name, value in fields.items() if name != "entries"}).encode()
    for none in (b"", empty, b"{", b"[]", b'{"entries": [3]}'):
        assert merged_dumps(none, nccl) == nccl
        assert merged_dumps(gloo, none) == gloo
    assert merged_dumps(empty, b"") == empty


def test_what_each_ring_has_overwritten_is_added_up() -> None:
    fields: dict[str, Any] = json.loads(one_of("by-hand-nccl-2.10-json"))
    late = {**fields, "entries": [{**entry, "record_id": entry["record_id"] + 40} for entry in fields["entries"]]}
    lost = read_dump(json.dumps(fields).encode(), 0).lost
    merged = read_dump(merged_dumps(json.dumps(late).encode(), json.dumps(late).encode()), 0)
    assert merged.lost == 2 * (lost + 40)
