"""The framing of TFRecord files: length, checksum of the length, payload, checksum of the payload.

Checksums are CRC-32C, masked: rotated right by 15 bits, plus a constant. All numbers are little-endian.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.benchmark.data.errors import BadData, BadRecord

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
FOOTER_BYTES = _CHECKSUM.size
_MASK_DELTA = 0xA282EAD8
_COPY_AGAIN = "copy the file again, or move it out of the folder"


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    """Imported on first use: a run without data needs no package of the extra "data"."""
    try:
        from google_crc32c import value
    except ImportError as missing:
        raise BadData(
            "record files need the package google-crc32c; install it with 'pip install lockstep-torch[data]'."
        ) from missing
    found: Callable[[bytes], int] = value
    return found


def masked_checksum(data: bytes) -> int:
    """The checksum as the file stores it."""
    checksum = int(_crc32c()(data))
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return (rotated + _MASK_DELTA) & 0xFFFFFFFF


def framed(payload: bytes) -> bytes:
    """One record, ready to be appended to a file."""
    length = _LENGTH.pack(len(payload))
    return b"".join(
        (length, _CHECKSUM.pack(masked_checksum(length)), payload, _CHECKSUM.pack(masked_checksum(payload)))
    )


def write_record(file: BinaryIO, payload: bytes) -> None:
    """Append one record."""
    file.write(framed(payload))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where a payload is in its file."""

    offset: int
    length: int


def index_records(path: Path) -> list[ByteRange]:
    """Where the records of a file are. Reads only the headers, and verifies their checksums.

    Raises:
        BadData: the file cannot be read, or its framing is broken; the text names the place.
    """
    spans: list[ByteRange] = []
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); check its permissions.") from None
    try:
        size = os.fstat(descriptor).st_size
        position = 0
        while position < size:
            span = _span_at(path, position, os.pread(descriptor, HEADER_BYTES, position), size)
            spans.append(span)
            position = span.offset + span.length + FOOTER_BYTES
    finally:
        os.close(descriptor)
    return spans


def _span_at(path: Path, position: int, header: bytes, size: int) -> ByteRange:
    if len(header) < HEADER_BYTES:
        raise BadData(f"{path} is truncated: it ends in the header of the record at byte {position}; {_COPY_AGAIN}.")
    length = _LENGTH.unpack_from(header)[0]
    if _CHECKSUM.unpack_from(header, _LENGTH.size)[0] != masked_checksum(header[: _LENGTH.size]):
        raise BadData(
            f"{path} is not a TFRecord file or is damaged: the checksum of the length at byte {position} is wrong; "
            f"{_COPY_AGAIN}."
        )
    end = position + HEADER_BYTES + length + FOOTER_BYTES
    if end > size:
        raise BadData(
            f"{path} is truncated: the record at byte {position} ends at byte {end}, the file at {size}; {_COPY_AGAIN}."
        )
    return ByteRange(position + HEADER_BYTES, length)


def read_payload(descriptor: int, span: ByteRange) -> bytes:
    """One payload, with its checksum verified; BadRecord if it is damaged."""
    data = os.pread(descriptor, span.length + FOOTER_BYTES, span.offset)
    if len(data) < span.length + FOOTER_BYTES:
        raise BadRecord("the file has become shorter since it was opened")
    payload = data[: span.length]
    if _CHECKSUM.unpack_from(data, span.length)[0] != masked_checksum(payload):
        raise BadRecord(f"the checksum of the record at byte {span.offset - HEADER_BYTES} is wrong")
    return payload
