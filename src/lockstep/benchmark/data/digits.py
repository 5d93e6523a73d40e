"""1,797 handwritten digits of 8 x 8 pixels, included in this package: a first run needs no download.

They are the test part of the UCI set "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
CC BY 4.0), the same that scikit-learn ships. ``digits.bin`` is the labels, then the pixels (0 to 16), packed with zlib.
"""

from __future__ import annotations

import zlib
from importlib import resources

import numpy as np

from lockstep.benchmark.data.source import TRAIN, ArraySource

COUNT = 1797
CLASSES = 10
SIDE = 8
_BRIGHTEST = 16
_HELD_OUT = 5
"""Every fifth digit is held out for evaluation."""


def digits_source(split: str) -> ArraySource:
    """The four fifths of the digits for training, or the fifth that is held out."""
    packed = resources.files(__package__).joinpath("digits.bin").read_bytes()
    raw = np.frombuffer(zlib.decompress(packed), np.uint8)
    labels = raw[:COUNT].astype(np.int64)
    grey = (raw[COUNT:].reshape(COUNT, SIDE, SIDE).astype(np.uint16) * 255 // _BRIGHTEST).astype(np.uint8)
    held_out = np.arange(COUNT) % _HELD_OUT == _HELD_OUT - 1
    chosen = ~held_out if split == TRAIN else held_out
    pixels = np.repeat(grey[chosen][..., np.newaxis], 3, axis=-1)
    return ArraySource(pixels, labels[chosen], CLASSES)
