"""What a data set is to the pipeline: a number of samples, and where each one is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.data.errors import BadRecord
from lockstep.benchmark.data.example import PictureExample, decode_example
from lockstep.benchmark.data.records import ByteRange, read_payload

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)


@dataclass(frozen=True, slots=True)
class Reference:
    """Where one encoded image is. ``length`` -1: the whole file is the image, and ``label`` its class;
    otherwise it is a record, which contains its class."""

    path: str
    offset: int = 0
    length: int = -1
    label: int = -1

    def __str__(self) -> str:
        return self.path if self.length < 0 else f"{self.path}, record at byte {self.offset}"


class EncodedSource(Protocol):
    """Images in files, to be decoded."""

    classes: int

    def __len__(self) -> int: ...

    def reference(self, index: int) -> Reference:
        """Where sample ``index`` is."""


@dataclass(frozen=True, slots=True)
class ArraySource:
    """Small images, all in memory: ``pixels`` (n, height, width, 3) and ``labels`` (n,)."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    classes: int

    def __len__(self) -> int:
        return len(self.labels)


Source = EncodedSource | ArraySource


class Reader:
    """Reads what references point to. Keeps record files open, because one file holds many records."""

    def __init__(self, most_open: int = 64) -> None:
        self._most = most_open
        self._open: dict[str, int] = {}

    def read(self, reference: Reference, classes: int) -> PictureExample:
        """One encoded image with its class; BadRecord if it is not available."""
        try:
            picture = self._read(reference)
        except OSError as error:
            raise BadRecord(f"it cannot be read ({error.strerror})") from None
        if not 0 <= picture.label < classes:
            raise BadRecord(f"its label {picture.label} is not between 0 and {classes - 1}")
        return picture

    def _read(self, reference: Reference) -> PictureExample:
        if reference.length < 0:
            return PictureExample(Path(reference.path).read_bytes(), reference.label)
        descriptor = self._open.get(reference.path)
        if descriptor is None:
            if len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = self._open[reference.path] = os.open(reference.path, os.O_RDONLY)
        return decode_example(read_payload(descriptor, ByteRange(reference.offset, reference.length)))

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
