"""Messages to bytes and back.

Every dataclass of ``protocol.core.messages`` is matched by name with a message of ``contract.proto``; the table is
built once, at import, from the committed descriptor set, and a class without a counterpart fails there. Bytes from
a peer are checked for size and for the number of elements (``element_count.py``) before they are parsed; every number
in them has bounds, and every text is one plain line (``lockstep.foreign``), except those that must stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from importlib import resources
from typing import Any, Final, get_args, get_origin, get_type_hints

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, EncodeError

from lockstep.foreign import plain
from lockstep.protocol.core import messages
from lockstep.protocol.core.messages import Description, Envelope, GradientNote, HandOn, MeanNote, Note, VersionNote
from lockstep.transports.control.bounds import in_bounds, is_step, must_name_a_task, names_a_task, stays_as_it_is
from lockstep.transports.control.element_count import ElementCounter
from lockstep.transports.memory import MAX_NOTE_BYTES

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest control message. A model with a hundred thousand parameters describes itself in less than half of it."""

MAX_JOINED_BYTES: Final = MAX_MESSAGE_BYTES + (128 << 10)
"""Largest ``Envelopes``: one control message of the largest size after some small ones."""

MAX_ELEMENTS: Final = 1 << 18
"""All elements of all lists that arrive together: an empty one costs two bytes on the wire and a hundred as an object.
A model with a hundred thousand parameters, and as many tensors that are not trained, has fewer."""

_SMALL: Final = 4096
"""Messages of up to so many bytes cannot have many elements, and are not counted: nearly all are smaller."""


class WireError(Exception):
    """Bytes that are not one of our messages, or a message that cannot be encoded; the text is a plain sentence."""


ProtoClass = Any
"""A message class that protobuf builds at run time; the type checker cannot see inside."""

_Pack = Callable[[Any], Any]
_Unpack = Callable[[Any], Any]


def _load_proto_classes() -> Mapping[str, ProtoClass]:
    """All message classes of the contract by their short name, in a separate pool."""
    data = resources.files(__package__).joinpath("contract.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    classes: dict[str, ProtoClass] = {}
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            classes[message.name] = message_factory.GetMessageClass(descriptor)
    return classes


def _is_message_class(kind: object) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_enum(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _field_name(kind: type) -> str:
    """``GroupRates`` -> ``group_rates``: how the contract names the member of the envelope's oneof."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


class _Shapes:
    """For each dataclass: a function that turns it into keyword arguments for protobuf, and one that reads it back."""

    def __init__(self, proto: Mapping[str, ProtoClass]) -> None:
        self._proto = proto
        self._made: dict[type, tuple[_Pack, _Unpack]] = {}

    def of(self, kind: type) -> tuple[_Pack, _Unpack]:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: type) -> tuple[_Pack, _Unpack]:
        hints = get_type_hints(kind)
        names = tuple(field.name for field in dataclasses.fields(kind))
        there = {field.name for field in self._proto[kind.__name__].DESCRIPTOR.fields}
        if there != set(names):
            raise TypeError(f"contract.proto and messages.py disagree on {kind.__name__}: {sorted(there ^ set(names))}")
        packs = tuple((name, self._pack_field(hints[name])) for name in names)
        unpacks = tuple((name, self._unpack_field(kind.__name__, name, hints[name])) for name in names)

        def pack(value: Any) -> dict[str, Any]:
            return {n: f(getattr(value, n)) if f is not None else getattr(value, n) for n, f in packs}

        def unpack(value: Any) -> Any:
            return kind(*[f(value) if f is not None else getattr(value, n) for n, f in unpacks])

        return pack, unpack

    def _pack_field(self, hint: Any) -> _Pack | None:
        if _is_message_class(hint):
            return self.of(hint)[0]
        if get_origin(hint) is tuple and _is_message_class(get_args(hint)[0]):
            element = self.of(get_args(hint)[0])[0]
            return lambda values: [element(value) for value in values]
        if _is_enum(hint):
            return lambda value: value.name
        return None

    def _unpack_field(self, owner: str, name: str, hint: Any) -> _Unpack | None:
        """A function from the *owning* proto message to the field's value; None if plain getattr is enough."""
        if _is_message_class(hint):
            inner = self.of(hint)[1]

            def unpack_inner(value: Any) -> Any:
                if not value.HasField(name):
                    raise WireError(f"a {owner} came without its {name}")
                return inner(getattr(value, name))

            return unpack_inner
        if _is_enum(hint):
            members = hint.__members__

            def unpack_enum(value: Any) -> Any:
                said = getattr(value, name)
                if said not in members:
                    raise WireError(f"a {owner} came with {name}={said[:40]!r}, which this version does not know")
                return members[said]

            return unpack_enum
        if get_origin(hint) is not tuple:
            checked = _checker(owner, name, hint)
            return None if checked is None else lambda value: checked(getattr(value, name))
        kind = get_args(hint)[0]
        element = self.of(kind)[1] if _is_message_class(kind) else _checker(owner, name, kind)

        def unpack_tuple(value: Any) -> tuple[Any, ...]:
            items = getattr(value, name)
            return tuple(items) if element is None else tuple([element(item) for item in items])

        return unpack_tuple


def _checker(owner: str, name: str, kind: Any) -> _Unpack | None:
    """What a single value of this field goes through; None: all values are fine."""
    if kind is str and not must_name_a_task(owner, name):
        return None if stays_as_it_is(owner, name) else plain
    within = partial(names_a_task, name) if kind is str else in_bounds(name, kind)
    if within is None:
        return None

    def checked(value: Any) -> Any:
        if not within(value):
            said = plain(str(value), 40)
            raise WireError(f"a {owner} came with {name}={said}, which is out of range")
        return value

    return checked


_PROTO: Final = _load_proto_classes()
_SHAPES: Final = _Shapes(_PROTO)
_ENVELOPE: Final = _PROTO["Envelope"]
_ENVELOPES: Final = _PROTO["Envelopes"]
_ELEMENT_TAG: Final = b"\x0a"
"""Field 1 with a length, as protobuf writes it: the elements of ``Envelopes``."""
_DESCRIPTION: Final = _PROTO["Description"]
_COUNTED: Final = {proto: ElementCounter(proto.DESCRIPTOR) for proto in (_ENVELOPE, _ENVELOPES)}
_MEMBERS: Final = {kind: (_field_name(kind), _SHAPES.of(kind)[0]) for kind in get_args(messages.Message)}
_READERS: Final = {_field_name(kind): _SHAPES.of(kind)[1] for kind in get_args(messages.Message)}


def _checked(what: str, data: bytes, limit: int = MAX_MESSAGE_BYTES) -> bytes:
    if len(data) > limit:
        raise WireError(f"{what} of {len(data)} bytes is larger than the {limit} we accept")
    return data


def _serialized(what: str, proto: ProtoClass, fields: Mapping[str, Any]) -> bytes:
    try:
        data: bytes = proto(**fields).SerializeToString()
    except (TypeError, ValueError, EncodeError) as error:
        raise WireError(f"{what} cannot be sent: {error}") from error
    return _checked(what, data)


def _parsed(what: str, proto: ProtoClass, data: bytes, limit: int = MAX_MESSAGE_BYTES) -> Any:
    _checked(what, data, limit)
    if len(data) > _SMALL and proto in _COUNTED and _COUNTED[proto].exceeds(data, MAX_ELEMENTS):
        raise WireError(f"{what} of {len(data)} bytes has more than the {MAX_ELEMENTS} elements we accept")
    try:
        return proto.FromString(data)
    except (DecodeError, ValueError) as error:
        raise WireError(f"{len(data)} bytes arrived that are not a valid {what}") from error


def encode(envelope: Envelope) -> bytes:
    """One envelope as the bytes of the contract's ``Envelope``."""
    message = envelope.message
    try:
        name, pack = _MEMBERS[type(message)]
    except KeyError:
        raise WireError(f"a {type(message).__name__} cannot be sent: it is not in the contract") from None
    fields = {
        "job": envelope.job,
        "sender": envelope.sender,
        "incarnation": envelope.incarnation,
        name: pack(message),
    }
    return _serialized(type(message).__name__, _ENVELOPE, fields)


def decode(data: bytes) -> Envelope:
    """The envelope in these bytes; ``WireError`` says what is wrong with them."""
    return _read_envelope(_parsed("Envelope", _ENVELOPE, data))


def join_envelopes(encoded: Sequence[bytes]) -> bytes:
    """Several encoded envelopes as the bytes of the contract's ``Envelopes``, without encoding them again."""
    parts: list[bytes] = []
    for data in encoded:
        parts += (_ELEMENT_TAG, _varint(len(data)), data)
    return b"".join(parts)


def decode_envelopes(data: bytes) -> list[Envelope]:
    """All envelopes in these bytes, in order; ``WireError`` says what is wrong with them."""
    return [_read_envelope(one) for one in _parsed("Envelopes", _ENVELOPES, data, MAX_JOINED_BYTES).envelopes]


def _varint(number: int) -> bytes:
    """A length as protobuf writes it: seven bits per byte, the lowest first."""
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _read_envelope(proto: Any) -> Envelope:
    name = proto.WhichOneof("message")
    if name is None:
        raise WireError("an envelope came without a message that this version knows")
    message = _READERS[name](getattr(proto, name))
    return Envelope(proto.job, plain(proto.sender), proto.incarnation, message)


def encode_description(description: Description) -> bytes:
    """One description as the bytes of the contract's ``Description``."""
    return _serialized("Description", _DESCRIPTION, _SHAPES.of(Description)[0](description))


def decode_description(data: bytes) -> Description:
    """The description in these bytes; ``WireError`` says what is wrong with them."""
    description: Description = _SHAPES.of(Description)[1](_parsed("Description", _DESCRIPTION, data))
    return description


def encode_snapshot(json: bytes) -> bytes:
    """JSON of a snapshot as the bytes of the contract's ``SnapshotReply``."""
    return _serialized("SnapshotReply", _PROTO["SnapshotReply"], {"json": json})


def encode_witness_request(task: str) -> bytes:
    """The question what a task finds at the address of another."""
    return _serialized("WitnessRequest", _PROTO["WitnessRequest"], {"task": task})


def decode_witness_request(data: bytes) -> str:
    return plain(_parsed("WitnessRequest", _PROTO["WitnessRequest"], data).task)


def decode_snapshot(data: bytes) -> bytes:
    """The JSON in these bytes; ``WireError`` says what is wrong with them."""
    json: bytes = _parsed("SnapshotReply", _PROTO["SnapshotReply"], data).json
    return json


# A note travels with every bucket, so it is a struct, not a protobuf message: kind, step or version, bucket, edition.
# What is handed on with a mean follows it, if it fits; it is mostly the same for all buckets of a step.
_NOTE: Final = struct.Struct("<cqII")
_GRADIENT: Final = b"G"
_VERSION: Final = b"V"
_MEAN: Final = b"M"


def encode_note(note: Note) -> bytes:
    """A note as 17 bytes, and what is handed on with a mean."""
    try:
        if isinstance(note, GradientNote):
            return _NOTE.pack(_GRADIENT, note.step, note.bucket, note.edition)
        if isinstance(note, MeanNote):
            return _NOTE.pack(_MEAN, note.step, note.bucket, 0) + _encode_handed(note.update)
        return _NOTE.pack(_VERSION, note.version, note.bucket, 0)
    except struct.error as error:
        raise WireError(f"{note} cannot be sent: {error}") from error


def fits_in_note(update: HandOn) -> bool:
    """Whether this can travel with its mean."""
    return len(_encode_handed(update)) <= MAX_NOTE_BYTES - _NOTE.size


def _encode_handed(update: HandOn | None) -> bytes:
    """Without its step and its bucket, which the note has."""
    return b"" if update is None else _encode_handed_anywhere(dataclasses.replace(update, step=0, bucket=0))


@lru_cache(maxsize=8)
def _encode_handed_anywhere(update: HandOn) -> bytes:
    return _serialized("HandOn", _PROTO["HandOn"], _SHAPES.of(HandOn)[0](update))


def _decode_handed(data: bytes, step: int, bucket: int) -> HandOn:
    return dataclasses.replace(_decode_handed_anywhere(data), step=step, bucket=bucket)


@lru_cache(maxsize=8)
def _decode_handed_anywhere(data: bytes) -> HandOn:
    update: HandOn = _SHAPES.of(HandOn)[1](_parsed("HandOn", _PROTO["HandOn"], data))
    return update


def decode_note(data: bytes) -> Note:
    """The note in these bytes; ``WireError`` says what is wrong with them."""
    more = len(data) - _NOTE.size
    if more < 0 or (more and data[:1] != _MEAN):
        raise WireError(f"a note has {_NOTE.size} bytes, this one has {len(data)}")
    kind, number, bucket, edition = _NOTE.unpack_from(data)
    if not is_step(number):
        raise WireError(f"a note came with {number}, which is neither a step nor a version")
    if kind == _GRADIENT:
        return GradientNote(number, bucket, edition)
    if kind == _VERSION:
        return VersionNote(number, bucket)
    if kind == _MEAN:
        return MeanNote(number, bucket, _decode_handed(data[_NOTE.size :], number, bucket) if more else None)
    raise WireError(f"a note begins with G, V or M, this one with {kind!r}")
