"""TensorBoard's event files: TFRecords of ``Event`` messages, with scalars, histograms and images."""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lockstep.benchmark.data.records import framed
from lockstep.private_files import fresh_file

_FIELD = descriptor_pb2.FieldDescriptorProto
_DOUBLE, _FLOAT, _INT64, _INT32 = _FIELD.TYPE_DOUBLE, _FIELD.TYPE_FLOAT, _FIELD.TYPE_INT64, _FIELD.TYPE_INT32
_STRING, _BYTES, _MESSAGE = _FIELD.TYPE_STRING, _FIELD.TYPE_BYTES, _FIELD.TYPE_MESSAGE

_SHAPES: dict[str, tuple[tuple[str, int, Any, str, bool], ...]] = {
    "Histogram": (
        ("min", 1, _DOUBLE, "", False),
        ("max", 2, _DOUBLE, "", False),
        ("num", 3, _DOUBLE, "", False),
        ("sum", 4, _DOUBLE, "", False),
        ("sum_squares", 5, _DOUBLE, "", False),
        ("bucket_limit", 6, _DOUBLE, "", True),
        ("bucket", 7, _DOUBLE, "", True),
    ),
    "Image": (
        ("height", 1, _INT32, "", False),
        ("width", 2, _INT32, "", False),
        ("colorspace", 3, _INT32, "", False),
        ("encoded_image_string", 4, _BYTES, "", False),
    ),
    "Value": (
        ("tag", 1, _STRING, "", False),
        ("simple_value", 2, _FLOAT, "", False),
        ("image", 4, _MESSAGE, "Image", False),
        ("histo", 5, _MESSAGE, "Histogram", False),
    ),
    "Summary": (("value", 1, _MESSAGE, "Value", True),),
    "Event": (
        ("wall_time", 1, _DOUBLE, "", False),
        ("step", 2, _INT64, "", False),
        ("file_version", 3, _STRING, "", False),
        ("summary", 5, _MESSAGE, "Summary", False),
    ),
}
"""name: (field, number, type, message, repeated) of the messages, as TensorFlow numbers them."""

_BINS = 30


@functools.cache
def _event_class() -> Any:
    # Proto2, because a scalar of exactly 0 must be written and not left out as a default.
    file = descriptor_pb2.FileDescriptorProto(name="lockstep/event.proto", package="lockstep.events", syntax="proto2")
    for name, fields in _SHAPES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of_message, repeated in fields:
            added = message.field.add(name=field, number=number, type=kind)
            added.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if of_message:
                added.type_name = f".lockstep.events.{of_message}"
            elif repeated:
                added.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("lockstep.events.Event"))


class EventFile:
    """One event file, to which events are appended."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = fresh_file(self.path)
        self._write(_event_class()(wall_time=time.time(), file_version="brain.Event:2"))

    def _write(self, event: Any) -> None:
        self._file.write(framed(event.SerializeToString()))
        self._file.flush()

    def _event(self, step: int) -> Any:
        return _event_class()(wall_time=time.time(), step=step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        event = self._event(step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._write(event)

    def histogram(self, step: int, tag: str, values: npt.NDArray[np.floating[Any]]) -> None:
        """The distribution of the values; those that are not finite are left out."""
        finite = values[np.isfinite(values)].astype(np.float64)
        if not finite.size:
            return
        counts, edges = np.histogram(finite, _BINS)
        event = self._event(step)
        histogram = event.summary.value.add(tag=tag).histo
        histogram.min, histogram.max, histogram.num = float(finite.min()), float(finite.max()), float(finite.size)
        histogram.sum, histogram.sum_squares = float(finite.sum()), float(np.square(finite).sum())
        histogram.bucket_limit.extend(edges[1:].tolist())
        histogram.bucket.extend(counts.astype(np.float64).tolist())
        self._write(event)

    def image(self, step: int, tag: str, png: bytes, width: int, height: int) -> None:
        event = self._event(step)
        image = event.summary.value.add(tag=tag).image
        image.width, image.height, image.colorspace, image.encoded_image_string = width, height, 3, png
        self._write(event)

    def close(self) -> None:
        self._file.close()
