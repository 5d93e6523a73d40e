"""Every message survives encoding and decoding; bad bytes give one plain sentence."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.reasons import because
from lockstep.protocol.core import messages
from lockstep.protocol.core.messages import (
    Description,
    Envelope,
    GradientNote,
    Grant,
    Heartbeat,
    Layout,
    Note,
    Open,
    ParameterEntry,
    Refused,
    Ticket,
    VersionNote,
)
from lockstep.transports.control import codec, generate
from lockstep.transports.control.codec import WireError

UNSIGNED_64 = st.integers(0, 2**64 - 1)
SIGNED_64 = st.integers(-(2**63), 2**63 - 1)
UNSIGNED_32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
INTEGERS = {
    FieldDescriptor.TYPE_FIXED64: UNSIGNED_64,
    FieldDescriptor.TYPE_UINT64: UNSIGNED_64,
    FieldDescriptor.TYPE_SINT64: SIGNED_64,
    FieldDescriptor.TYPE_UINT32: UNSIGNED_32,
}


def values_of(owner: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this class may hold, by its type there and, for numbers, in the contract."""
    if get_origin(hint) is tuple:
        return st.lists(values_of(owner, name, get_args(hint)[0]), max_size=4).map(tuple)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return messages_of(hint)
    if hint is int:
        return INTEGERS[codec._PROTO[owner.__name__].DESCRIPTOR.fields_by_name[name].type]
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXT,
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return st.sampled_from(hint) if issubclass(hint, Enum) else plain[hint]


def messages_of(kind: type) -> st.SearchStrategy[Any]:
    """Any value of one dataclass of the protocol."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values_of(kind, name, hint) for name, hint in hints.items()})


ANY_MESSAGE = st.one_of([messages_of(kind) for kind in get_args(messages.Message)])
ENVELOPES = st.builds(Envelope, UNSIGNED_64, TEXT, UNSIGNED_64, ANY_MESSAGE)


@settings(max_examples=400, deadline=None)
@given(ENVELOPES)
def test_an_envelope_comes_back_as_it_was(envelope: Envelope) -> None:
    assert codec.decode(codec.encode(envelope)) == envelope


@settings(max_examples=50, deadline=None)
@given(st.lists(ENVELOPES, max_size=5))
def test_envelopes_joined_without_encoding_them_again_come_back_in_order(envelopes: list[Envelope]) -> None:
    joined = codec.join_envelopes([codec.encode(envelope) for envelope in envelopes])
    assert codec.decode_envelopes(joined) == envelopes


@pytest.mark.parametrize("size", [0, 100, 127, 128, 16_383, 16_384, 3_000_000])
def test_joining_writes_lengths_of_every_magnitude_as_protobuf_does(size: int) -> None:
    envelope = Envelope(1, "x", 2, Refused(because("r" * size)))
    assert codec.decode_envelopes(codec.join_envelopes([codec.encode(envelope)] * 2)) == [envelope] * 2


@settings(deadline=None)
@given(messages_of(Description))
def test_a_description_comes_back_as_it_was(description: Description) -> None:
    assert codec.decode_description(codec.encode_description(description)) == description


@given(
    st.one_of(
        st.builds(GradientNote, SIGNED_64, UNSIGNED_32, UNSIGNED_32), st.builds(VersionNote, SIGNED_64, UNSIGNED_32)
    )
)
def test_a_note_comes_back_as_it_was_and_stays_small(note: Note) -> None:
    data = codec.encode_note(note)
    assert len(data) <= 20
    assert codec.decode_note(data) == note


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused_with_a_wire_error(data: bytes) -> None:
    for read in (codec.decode, codec.decode_envelopes, codec.decode_description, codec.decode_note):
        with suppress(WireError):
            read(data)


@settings(max_examples=100, deadline=None)
@given(ENVELOPES, st.data())
def test_a_damaged_envelope_is_read_or_refused_with_a_wire_error(envelope: Envelope, data: st.DataObject) -> None:
    damaged = bytearray(codec.encode(envelope))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    with suppress(WireError):
        codec.decode(cut)


def test_the_committed_descriptors_are_those_of_the_contract() -> None:
    assert generate.DESCRIPTORS.read_bytes() == generate.compile_contract(), (
        "contract.proto has changed: run python -m lockstep.transports.control.generate"
    )


def test_the_contract_has_no_message_without_a_dataclass_but_for_the_wire_itself() -> None:
    wire_only = {"DescribeRequest", "WatchRequest", "SnapshotRequest", "SnapshotReply", "DataFrame", "Envelopes"}
    wire_only |= {"WitnessRequest"}
    dataclasses_there = {
        name for name, kind in vars(messages).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    notes = {"GradientNote", "VersionNote"}
    assert set(codec._PROTO) - wire_only == dataclasses_there - notes


def test_a_message_that_is_too_large_is_refused_on_both_sides_before_it_is_parsed() -> None:
    huge = "x" * (codec.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(WireError, match="larger than the 16777216 we accept"):
        codec.encode(Envelope(0, "", 0, Refused(because(huge))))
    with pytest.raises(WireError, match="larger than"):
        codec.decode(bytes(codec.MAX_MESSAGE_BYTES + 1))


def test_too_many_elements_are_refused_before_python_objects_are_made() -> None:
    # An empty ParameterEntry is two bytes on the wire: field 3 with length 0.
    layout = b"\x1a\x00" * (codec.MAX_ELEMENTS + 1)
    envelope = b"\x52" + codec._varint(len(layout)) + layout
    with pytest.raises(WireError, match="1048577 parameters, more than"):
        codec.decode(envelope)
    assert codec.decode(codec.encode(Envelope(0, "", 0, Layout("", 0, (ParameterEntry("", 0, "", 0),), ()))))


def test_a_message_whose_inner_message_is_missing_is_refused() -> None:
    grant_without_ticket = b"\x5a\x00"
    with pytest.raises(WireError, match="a Grant came without its ticket"):
        codec.decode(grant_without_ticket)
    ticket = Ticket("grpc", 0, 0, 0, b"")
    assert codec.decode(codec.encode(Envelope(0, "", 0, Grant(ticket)))).message == Grant(ticket)


def test_an_envelope_of_a_later_version_with_an_unknown_message_is_refused() -> None:
    unknown_member = b"\xfa\x3f\x00"  # field 1023, length 0
    with pytest.raises(WireError, match="without a message that this version knows"):
        codec.decode(unknown_member)


@pytest.mark.parametrize(
    "message",
    [Open(2**70, ()), Open(0, (-1,)), Heartbeat("soon"), Refused(because("\ud800"))],  # type: ignore[arg-type]
    ids=["step too large", "negative bucket", "wrong type", "lone surrogate"],
)
def test_a_value_that_the_contract_cannot_hold_is_a_wire_error(message: messages.Message) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        codec.encode(Envelope(0, "", 0, message))


def test_a_note_that_does_not_fit_and_a_note_of_another_kind_are_wire_errors() -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        codec.encode_note(GradientNote(0, -1))
    with pytest.raises(WireError, match="17 bytes"):
        codec.decode_note(b"G")
    with pytest.raises(WireError, match="begins with G or V"):
        codec.decode_note(b"X" + bytes(16))
