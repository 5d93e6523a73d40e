"""1,797 handwritten digits of 8 x 8 pixels, included in this package: a first run needs no download.

They are the test part of the UCI set "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
CC BY 4.0). ``digits.bin`` is the labels, then the pixels (0 to 16), packed with zlib.
"""

from __future__ import annotations

import zlib
from importlib import resources

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.data.source import TRAIN, ArraySource

COUNT = 1797
CLASSES = 10
SIDE = 8
BRIGHTEST = 16
_HELD_OUT = 5
"""Every fifth digit is held out for evaluation."""


def load_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (0 to 16) and labels of all digits, as the set has them."""
    packed = resources.files(__package__).joinpath("digits.bin").read_bytes()
    raw = np.frombuffer(zlib.decompress(packed), np.uint8)
    return raw[COUNT:].reshape(COUNT, SIDE, SIDE), raw[:COUNT].astype(np.int64)


def digits_source(split: str) -> ArraySource:
    """The four fifths of the digits for training, or the fifth that is held out."""
    images, labels = load_digits()
    grey = (images.astype(np.uint16) * 255 // BRIGHTEST).astype(np.uint8)
    held_out = np.arange(COUNT) % _HELD_OUT == _HELD_OUT - 1
    chosen = ~held_out if split == TRAIN else held_out
    pixels = np.repeat(grey[chosen][..., np.newaxis], 3, axis=-1)
    return ArraySource(pixels, labels[chosen], CLASSES)
