"""Framing and content of TFRecord files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.records import read_records
from lockstep.benchmark.data.errors import BadData, BadRecord
from lockstep.benchmark.data.example import PictureExample, decode_example, encode_example
from lockstep.benchmark.data.records import framed, index_records, masked_checksum


def test_masked_checksum_has_the_published_value() -> None:
    # CRC-32C of "123456789" is e3069283 (RFC 3720); masked as TFRecord files do.
    assert masked_checksum(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    payloads = [b"", b"one", b"x" * 70_000]
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(b"".join(framed(payload) for payload in payloads))
    assert list(read_records(path)) == payloads


def test_a_record_has_the_documented_bytes() -> None:
    record = framed(b"abc")
    assert record[:8] == struct.pack("<Q", 3)
    assert record[12:15] == b"abc"
    assert len(record) == 8 + 4 + 3 + 4


@pytest.mark.parametrize("kept", [1, 11, 12, 14, 18])
def test_a_file_that_is_cut_off_is_named_at_the_start(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(framed(b"abc") + framed(b"abc")[:kept])
    with pytest.raises(BadData, match=r"train-00000-of-00001 is truncated.*byte 19"):
        index_records(path)


def test_a_file_that_is_no_tfrecord_is_named_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(b"these are not records at all" * 10)
    with pytest.raises(BadData, match="is not a TFRecord file or is damaged"):
        index_records(path)


def test_a_flipped_bit_in_a_payload_is_found(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    record = bytearray(framed(b"abcdef"))
    record[14] ^= 1
    path.write_bytes(framed(b"first") + record)
    reading = read_records(path)
    assert next(reading) == b"first"
    with pytest.raises(BadRecord, match="checksum of the record at byte 21 is wrong"):
        next(reading)


_BOXES = st.lists(st.tuples(*[st.floats(0, 1, width=32)] * 4), max_size=4)


@given(st.binary(min_size=1), st.integers(0, 1000), st.text(), _BOXES)
def test_examples_come_back_as_they_were_written(
    encoded: bytes, label: int, text: str, boxes: list[tuple[float, float, float, float]]
) -> None:
    text = text.encode(errors="ignore").decode()
    picture = PictureExample(encoded, label, text, tuple(boxes))
    assert decode_example(encode_example(picture)) == picture


def test_example_reads_bytes_that_another_writer_made() -> None:
    # Written by hand from the wire format: features { "image/class/label": int64 7, "image/encoded": "JPEG" }.
    def entry(key: bytes, feature: bytes) -> bytes:
        body = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([len(feature)]) + feature
        return b"\x0a" + bytes([len(body)]) + body

    label = b"\x1a\x03\x0a\x01\x07"
    encoded = b"\x0a\x06\x0a\x04JPEG"
    features = entry(b"image/class/label", label) + entry(b"image/encoded", encoded)
    assert decode_example(b"\x0a" + bytes([len(features)]) + features) == PictureExample(b"JPEG", 7)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xff\xff", "not a tf.Example"),
        (b"", "no image/encoded"),
        (encode_example(PictureExample(b"", 3)), "no image/encoded"),
    ],
)
def test_a_record_without_a_picture_says_what_it_lacks(payload: bytes, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        decode_example(payload)
