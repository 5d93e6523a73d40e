"""Every message survives encoding and decoding; bad bytes give one plain sentence."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
from contextlib import suppress
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.reasons import because
from lockstep.foreign import plain
from lockstep.protocol.core import messages
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import (
    Description,
    Envelope,
    Failed,
    GradientNote,
    Grant,
    HandOn,
    Heartbeat,
    Layout,
    Left,
    LocalState,
    MeanNote,
    Member,
    Note,
    Open,
    OptimizerEntry,
    ParameterEntry,
    Refused,
    Setting,
    Ticket,
    VersionNote,
    View,
)
from lockstep.transports.control import bounds, codec, generate
from lockstep.transports.control.codec import WireError

UNSIGNED_64 = st.integers(0, 2**64 - 1)
STEPS = st.integers(*bounds.WHOLE["step"])
INDICES = st.integers(*bounds.WHOLE["bucket"])
TEXT = st.text(max_size=40).map(plain)
TASKS = st.integers(0, 999_999).map(lambda index: str(worker(index)))
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def values_of(owner: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this class may hold, by its type there and, for numbers, the bounds of its name."""
    if get_origin(hint) is tuple:
        return st.lists(values_of(owner, name, get_args(hint)[0]), max_size=4).map(tuple)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return messages_of(hint)
    if hint is int:
        return UNSIGNED_64 if name in bounds.ANY_64_BITS else st.integers(*bounds.WHOLE[name])
    if hint is float:
        if name in bounds.MAY_BE_INFINITE:
            return st.floats(allow_nan=False)
        most = min(bounds.FRACTIONS[name], sys.float_info.max)
        return st.floats(-most, most)
    if bounds.must_name_a_task(owner.__name__, name):
        return TASKS
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: ANY_TEXT if bounds.stays_as_it_is(owner.__name__, name) else TEXT,
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
    }
    return st.sampled_from(hint) if issubclass(hint, Enum) else simple[hint]


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


@pytest.mark.parametrize("message", [Left("worker 0", 15), Failed("x", 1, because("y")), View(1, 1, (Member("", 2),))])
def test_a_name_that_machines_look_up_must_be_that_of_a_task(message: messages.Message) -> None:
    with pytest.raises(WireError, match="which is out of range"):
        codec.decode(codec.encode(Envelope(1, "x", 2, message)))


@settings(max_examples=50, deadline=None)
@given(st.lists(ENVELOPES, max_size=5))
def test_envelopes_joined_without_encoding_them_again_come_back_in_order(envelopes: list[Envelope]) -> None:
    joined = codec.join_envelopes([codec.encode(envelope) for envelope in envelopes])
    assert codec.decode_envelopes(joined) == envelopes


@pytest.mark.parametrize("size", [0, 100, 127, 128, 16_383, 16_384, 3_000_000])
def test_joining_writes_lengths_of_every_magnitude_as_protobuf_does(size: int) -> None:
    envelope = Envelope(1, "x", 2, LocalState(0, b"r" * size))
    assert codec.decode_envelopes(codec.join_envelopes([codec.encode(envelope)] * 2)) == [envelope] * 2


@settings(deadline=None)
@given(messages_of(Description))
def test_a_description_comes_back_as_it_was(description: Description) -> None:
    assert codec.decode_description(codec.encode_description(description)) == description


@given(st.one_of(st.builds(GradientNote, STEPS, INDICES, INDICES), st.builds(VersionNote, STEPS, INDICES)))
def test_a_note_comes_back_as_it_was_and_stays_small(note: Note) -> None:
    data = codec.encode_note(note)
    assert len(data) <= 20
    assert codec.decode_note(data) == note


@given(STEPS, INDICES, messages_of(HandOn))
def test_what_is_handed_on_travels_with_its_mean(step: int, bucket: int, update: HandOn) -> None:
    note = MeanNote(step, bucket, dataclasses.replace(update, step=step, bucket=bucket, mean=True))
    assert codec.decode_note(codec.encode_note(note)) == note
    assert codec.decode_note(codec.encode_note(MeanNote(step, bucket))) == MeanNote(step, bucket)


def test_what_is_too_long_for_a_note_does_not_fit_in_one() -> None:
    assert codec.fits_in_note(HandOn(3, 0, mean=True, without=tuple(range(100))))
    assert not codec.fits_in_note(HandOn(3, 0, mean=True, without=tuple(range(5000))))


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
    notes = {"GradientNote", "MeanNote", "VersionNote"}
    parts_of_messages = {"Homes", "Reason"}
    assert set(codec._PROTO) - wire_only == (dataclasses_there | parts_of_messages) - notes


def test_a_message_that_is_too_large_is_refused_on_both_sides_before_it_is_parsed() -> None:
    huge = "x" * (codec.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(WireError, match="larger than the 16777216 we accept"):
        codec.encode(Envelope(0, "", 0, Refused(because(huge))))
    with pytest.raises(WireError, match="larger than"):
        codec.decode(bytes(codec.MAX_MESSAGE_BYTES + 1))


def in_envelope(number: int, body: bytes) -> bytes:
    """An envelope whose message has this number in the contract."""
    return codec._varint(number << 3 | 2) + codec._varint(len(body)) + body


LAYOUT, OPEN, RATES = 10, 12, 14
FLOODS = {
    # An empty element is two bytes on the wire: a field with length 0.
    "envelopes": b"\x0a\x00" * 7_300_000,
    "parameters of seven layouts": codec.join_envelopes([in_envelope(LAYOUT, b"\x1a\x00" * (1 << 20))] * 7),
    "names of rates": codec.join_envelopes(
        [in_envelope(RATES, b"\x12" + codec._varint(2 << 20) + b"\x0a\x00" * (1 << 20))] * 7
    ),
    "buckets": codec.join_envelopes([in_envelope(OPEN, b"\x12" + codec._varint(8 << 20) + bytes(8 << 20))]),
    "the same number again and again": codec.join_envelopes([in_envelope(OPEN, b"\x08\x00" * (7 << 20))]),
    "groups": codec.join_envelopes([in_envelope(OPEN, b"\x1b\x1c" * (7 << 20))]),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_elements_is_refused_before_anything_is_made_of_it(flood: str) -> None:
    """14.7 MB took 26 seconds and a gigabyte, elements being counted list by list."""
    parsed: list[Envelope] = []
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="more than the 262144 elements we accept"):
            parsed += codec.decode_envelopes(FLOODS[flood])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not parsed
    assert most < 3 * len(FLOODS[flood])


def test_the_description_of_the_largest_model_is_not_a_flood() -> None:
    entries = tuple(ParameterEntry(f"layers.{n}.weight", 1 << 20, "float32", 0) for n in range(100_000))
    buffers = tuple(Setting(f"layers.{n}.mean", "0123456789abcdef") for n in range(100_000))
    layout = Layout("", 1 << 20, entries, (OptimizerEntry("SGD", "{}"),), buffers)
    (read,) = codec.decode_envelopes(codec.join_envelopes([codec.encode(Envelope(0, "", 0, layout))]))
    assert read.message == layout


@given(st.data())
def test_numbers_out_of_range_are_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted({"step", "start", "nbytes", "elements", "change"})))
    kind, field = {
        "step": (messages.Applied, "step"),
        "start": (messages.View, "start"),
        "nbytes": (messages.Saved, "nbytes"),
        "elements": (ParameterEntry, "elements"),
        "change": (messages.Commit, "change"),
    }[name]
    low, high = bounds.WHOLE[name]
    signed = name in ("step", "start", "change")
    wrong = data.draw(st.integers(high + 1, 2**63 - 1) | (st.integers(-(2**63), low - 1) if signed else st.nothing()))
    proto = codec._PROTO[kind.__name__](**{field: wrong})
    with pytest.raises(WireError, match="out of range"):
        codec._SHAPES.of(kind)[1](proto)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "message",
    [
        lambda x: Heartbeat(x),
        lambda x: messages.Roster((messages.MissingTask("t", "a", "f", x, 1),)),
        lambda x: messages.Rates(3, (messages.GroupRates(("lr",), (x,)),)),
    ],
    ids=["a heartbeat", "a missing task", "a learning rate"],
)
def test_a_number_that_is_not_finite_is_refused(message: Any, number: float) -> None:
    with pytest.raises(WireError, match="out of range"):
        codec.decode(codec.encode(Envelope(0, "", 0, message(number))))


def test_a_note_about_no_step_is_refused() -> None:
    with pytest.raises(WireError, match="neither a step nor a version"):
        codec.decode_note(codec.encode_note(GradientNote((1 << 63) - 1, 0)))


def test_text_of_a_peer_arrives_as_one_plain_line() -> None:
    """A ``Failed`` with escape sequences went to the coordinator's terminal as it was."""
    said = "\x1b]0;owned\x07\x1b[2Jfine\nlockstep: all is well\u202e"
    read = codec.decode(codec.encode(Envelope(0, said, 0, messages.Failed("", 3, because(said)))))
    assert isinstance(read.message, messages.Failed)
    for text in (read.sender, read.message.reason.text):
        assert text == "?]0;owned??[2Jfine lockstep: all is well?"
    long = codec.decode(codec.encode(Envelope(0, "", 0, Refused(because("x" * 100_000)))))
    assert isinstance(long.message, Refused)
    assert len(long.message.reason.text) <= 4096


def test_what_is_compared_with_our_own_arrives_as_it_was() -> None:
    layout = Layout("", 0, (ParameterEntry("a\tb\x1b", 1, "float32", 0),), (OptimizerEntry("SGD", "{\n}"),))
    assert codec.decode(codec.encode(Envelope(0, "", 0, layout))).message == layout


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
    with pytest.raises(WireError, match="begins with G, V or M"):
        codec.decode_note(b"X" + bytes(16))
