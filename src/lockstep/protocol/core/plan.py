"""The plan: which parameter lies in which bucket, and which server owns it at which offset.

A pure function of the parameter list and the number of homes, so every task computes the same one and only its hash
needs comparing. Three layouts follow from it:

* the *arena* of a worker: all buckets, one after another, in the order in which backward fills them (the last
  parameter first). Gradients and parameters of a worker use the same layout.
* the *shard* of a server: the buckets it owns, one after another; where buckets are whole pages, each starts on a page,
  so that workers on the server's host can map a parameter's pieces side by side.
* a *bucket*: neighbouring parameters, each at a 64-byte aligned offset. A parameter larger than a bucket is cut into
  pieces that fill whole buckets, so that in the arena it stays one contiguous range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from lockstep.protocol import phrases
from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.messages import ParameterEntry, Setting

ALIGNMENT = 64
PAGE = 4096
DEFAULT_BUCKET_BYTES = 4 << 20
MAX_BUCKETS = 1 << 20
"""Every step has several messages and table entries for each."""

PRESENCE = "(which parameters have a gradient)"
BUFFERS = "(the chief's buffers)"
NO_PARAMETERS = frozenset((PRESENCE, BUFFERS))
"""Entries of a plan that are no parameters (``training/ranks/layout.py``)."""

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2})


class PlanError(ValueError):
    """The parameter list cannot be planned; the text names the parameter."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one parameter inside a bucket."""

    parameter: int
    first: int
    elements: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring parameters packed into one flat buffer: the unit of transfer, reduction and version."""

    id: BucketId
    server: int
    dtype: str
    group: int
    nbytes: int
    arena_offset: int
    shard_offset: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that follows from the parameter list and the number of homes (``ClusterShape.homes``)."""

    parameters: tuple[ParameterEntry, ...]
    servers: int
    """The number of homes; without servers, of workers."""
    bucket_bytes: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def arena_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def shard_bytes(self, server: int) -> int:
        """The parameters of a server."""
        return sum(bucket.nbytes for bucket in self.buckets if bucket.server == server)

    def shard_room(self, server: int) -> int:
        """The memory that they occupy, including the gaps between them."""
        return max((b.shard_offset + b.nbytes for b in self.buckets if b.server == server), default=0)

    def buckets_of(self, server: int) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.server == server)

    def names_in(self, bucket: BucketId) -> tuple[str, ...]:
        """The parameters (or parts of them) inside a bucket, for reports; of a bucket without any, what else it has."""
        names = tuple(self.parameters[piece.parameter].name for piece in self.buckets[bucket].pieces)
        return tuple(name for name in names if name not in NO_PARAMETERS) or names

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits that are equal exactly when the plans are."""
        digest = hashlib.sha256(f"{self.servers} {self.bucket_bytes}".encode())
        for entry in self.parameters:
            # repr and not str: a name may contain the separator.
            digest.update(repr((entry.name, entry.elements, entry.dtype, entry.group)).encode())
        return digest.hexdigest()[:16]


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def make_plan(parameters: Sequence[ParameterEntry], servers: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Plan:
    """Pack the parameters, last one first, and give each bucket to the server with the fewest bytes so far."""
    _refuse_bad_input(parameters, servers, bucket_bytes)
    loads = [0] * servers
    ends = [0] * servers
    unit = PAGE if bucket_bytes % PAGE == 0 else ALIGNMENT
    arena_offset = 0
    buckets: list[Bucket] = []
    for filled in _pack(parameters, bucket_bytes):
        owner = loads.index(min(loads))
        buckets.append(
            Bucket(
                id=len(buckets),
                server=owner,
                dtype=filled.dtype,
                group=filled.group,
                nbytes=filled.nbytes,
                arena_offset=arena_offset,
                shard_offset=ends[owner],
                pieces=tuple(filled.pieces),
            )
        )
        loads[owner] += filled.nbytes
        ends[owner] += -(-filled.nbytes // unit) * unit
        arena_offset += filled.nbytes
    return Plan(tuple(parameters), servers, bucket_bytes, tuple(buckets))


def first_difference(ours: Sequence[ParameterEntry], theirs: Sequence[ParameterEntry]) -> str | None:
    """The first difference between two parameter lists, in words; None if they are equal."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return phrases.parameter_differs(index, mine, other)
    if len(ours) != len(theirs):
        longer = ours if len(ours) > len(theirs) else theirs
        extra = longer[min(len(ours), len(theirs))]
        return phrases.more_parameters(len(ours), len(theirs), extra)
    return None


def first_untrained_difference(chiefs: Sequence[Setting], others: Sequence[Setting]) -> str | None:
    """The first untrained tensor that differs from the chief's, in words; None if all are equal."""
    known = {setting.name: setting.value for setting in others}
    for setting in chiefs:
        if setting.name not in known:
            return phrases.lacks_untrained(setting.name)
        if known.pop(setting.name) != setting.value:
            return phrases.untrained_differs(setting.name)
    extra = next(iter(known), None)
    return None if extra is None else phrases.chief_lacks_untrained(extra)


def _refuse_bad_input(parameters: Sequence[ParameterEntry], servers: int, bucket_bytes: int) -> None:
    if servers < 1:
        raise PlanError("a plan needs at least one server")
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise PlanError(f"the bucket size must be a positive multiple of {ALIGNMENT} bytes, not {bucket_bytes}")
    elements = sum(max(0, entry.elements) for entry in parameters)
    if len(parameters) + 8 * elements // bucket_bytes > MAX_BUCKETS:
        raise PlanError(f"{elements} elements in buckets of {bucket_bytes} bytes are too many buckets")
    seen: set[str] = set()
    for entry in parameters:
        if entry.dtype not in ELEMENT_BYTES:
            raise PlanError(f"parameter {entry.name!r} has dtype {entry.dtype}; use one of {', '.join(ELEMENT_BYTES)}")
        if entry.elements < 0:
            raise PlanError(f"parameter {entry.name!r} has {entry.elements} elements")
        if entry.name in seen:
            raise PlanError(f"two parameters are named {entry.name!r}")
        seen.add(entry.name)


@dataclass(slots=True)
class _Filling:
    """A bucket that is being packed."""

    dtype: str
    group: int
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


def _pack(parameters: Sequence[ParameterEntry], bucket_bytes: int) -> list[_Filling]:
    """Walk the parameters from the last to the first and fill one bucket of each dtype and group at a time.

    Buckets are numbered as backward completes them, by the first of their parameters: a small group (the biases of
    all layers, say) has one bucket, which the first layer needs. The pieces of a large parameter stay next to each
    other.
    """
    begun: list[_Filling] = []
    filling: dict[tuple[str, int], _Filling] = {}

    def begin(entry: ParameterEntry) -> _Filling:
        bucket = _Filling(entry.dtype, entry.group)
        begun.append(bucket)
        filling[entry.dtype, entry.group] = bucket
        return bucket

    def filled_last(bucket: _Filling) -> int:
        """The parameter with which the bucket is complete; of a large parameter's buckets, all are with the last."""
        first = min(piece.parameter for piece in bucket.pieces)
        return min(piece.parameter for piece in last_of.get(first, bucket).pieces)

    last_of: dict[int, _Filling] = {}
    """By large parameter: the bucket with its last piece, and perhaps others."""
    for index in reversed(range(len(parameters))):
        entry = parameters[index]
        size = ELEMENT_BYTES[entry.dtype]
        bucket = filling.get((entry.dtype, entry.group))
        if bucket is None or bucket.nbytes + aligned(entry.elements * size) > bucket_bytes:
            bucket = begin(entry)
        first = 0
        # All but the last piece of a large parameter fill a whole bucket: no gap inside it.
        while (entry.elements - first) * size > bucket_bytes:
            whole = bucket_bytes // size
            bucket.pieces.append(Piece(index, first, whole, 0))
            bucket.nbytes = bucket_bytes
            first += whole
            bucket = last_of[index] = begin(entry)
        rest = entry.elements - first
        bucket.pieces.append(Piece(index, first, rest, bucket.nbytes))
        bucket.nbytes += aligned(rest * size)
    return sorted(begun, key=lambda one: -filled_last(one))
