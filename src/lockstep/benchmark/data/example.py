"""The message inside a TFRecord of images: ``tf.Example``, a map from names to lists of bytes, floats or integers.

The message type is described here and built by protobuf in a separate pool, so that TensorFlow may be loaded in the
same process. Feature names are those of the ImageNet conversion scripts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from lockstep.benchmark.data.errors import BadRecord

ENCODED = "image/encoded"
LABEL = "image/class/label"
TEXT = "image/class/text"
_BOX = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
MAX_BOXES = 1000

Box = tuple[float, float, float, float]
"""xmin, ymin, xmax, ymax as fractions of the image's width and height."""


@dataclass(frozen=True, slots=True)
class PictureExample:
    """What one record says about an image."""

    encoded: bytes
    label: int
    text: str = ""
    boxes: tuple[Box, ...] = ()


@functools.cache
def _example_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="lockstep/example.proto", package="lockstep.data", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), start=1):
        feature.field.add(
            name=name.lower(), number=number, type=field.TYPE_MESSAGE, type_name=f".lockstep.data.{name}",
            label=field.LABEL_OPTIONAL, oneof_index=0,
        )  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, type_name=".lockstep.data.Feature", label=field.LABEL_OPTIONAL
    )
    features.field.add(
        name="feature", number=1, type=field.TYPE_MESSAGE, type_name=".lockstep.data.Features.FeatureEntry",
        label=field.LABEL_REPEATED,
    )  # fmt: skip
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, type_name=".lockstep.data.Features",
        label=field.LABEL_OPTIONAL,
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("lockstep.data.Example"))


def decode_example(payload: bytes) -> PictureExample:
    """The image in a record; BadRecord if something is missing or the record is not an example at all."""
    message = _example_class()()
    try:
        message.ParseFromString(payload)
    except DecodeError:
        raise BadRecord("the record is not a tf.Example") from None
    features = message.features.feature
    encoded = features[ENCODED].byteslist.value if ENCODED in features else ()
    labels = features[LABEL].int64list.value if LABEL in features else ()
    if not encoded or not encoded[0]:
        raise BadRecord(f"the record has no {ENCODED}")
    if not labels:
        raise BadRecord(f"the record has no {LABEL}")
    texts = features[TEXT].byteslist.value if TEXT in features else ()
    text = texts[0].decode(errors="replace") if texts else ""
    return PictureExample(encoded[0], int(labels[0]), text, _boxes(features))


def _boxes(features: Any) -> tuple[Box, ...]:
    sides = [features[name].floatlist.value if name in features else () for name in _BOX]
    if len({len(side) for side in sides}) != 1:
        raise BadRecord("its bounding boxes do not have the same number of coordinates on every side")
    return tuple((x0, y0, x1, y1) for x0, y0, x1, y1 in zip(*(side[:MAX_BOXES] for side in sides), strict=True))


def encode_example(picture: PictureExample) -> bytes:
    """The payload of a record for an image."""
    message = _example_class()()
    features = message.features.feature
    features[ENCODED].byteslist.value.append(picture.encoded)
    features[LABEL].int64list.value.append(picture.label)
    features[TEXT].byteslist.value.append(picture.text.encode())
    for name, side in zip(_BOX, _columns(picture.boxes), strict=True):
        features[name].floatlist.value.extend(side)
    return bytes(message.SerializeToString(deterministic=True))


def _columns(boxes: Sequence[Box]) -> list[list[float]]:
    return [[box[side] for box in boxes] for side in range(4)]
