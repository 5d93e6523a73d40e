"""Batches from small images held in memory: nothing to decode, so no extra processes are needed."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.data.order import Order, mixed
from lockstep.benchmark.data.pipeline import HostBatch, InputStatus
from lockstep.benchmark.data.source import ArraySource
from lockstep.benchmark.data.transforms import Preparation

PADDING = 4
"""Distortion shifts an image by up to this many pixels in each direction."""


class ArrayBatches:
    """The batches of one worker. With ``distort_colors`` images are shifted and flipped at random."""

    def __init__(self, source: ArraySource, order: Order, how: Preparation, first_step: int = 0) -> None:
        self.status = InputStatus()
        self._source = source
        self._order = order
        self._how = how
        self._next_step = first_step
        side = source.pixels.shape[1]
        # The nearest source pixel for each pixel of the model's size.
        self._from = (np.arange(how.size) * side // how.size).astype(np.intp)

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        return None

    def next(self) -> HostBatch:
        places = self._order.places(self._next_step)
        chosen = np.array([place.index for place in places])
        pixels = self._source.pixels[chosen]
        if self._how.training and self._how.distort_colors:
            for number, place in enumerate(places):
                chance = random.Random(mixed(self._how.seed, place.epoch, place.index))
                pixels[number] = shifted_and_flipped(pixels[number], chance)
        if pixels.shape[1] != self._how.size or pixels.shape[2] != self._how.size:
            pixels = pixels[:, self._from][:, :, self._from]
        step = self._next_step
        self._next_step += 1
        return HostBatch(step, np.ascontiguousarray(pixels), self._source.labels[chosen])

    def close(self) -> None:
        """Nothing to end."""


def shifted_and_flipped(picture: npt.NDArray[np.uint8], chance: random.Random) -> npt.NDArray[np.uint8]:
    """Padded with black, cropped at a random position, and mirrored half of the time."""
    height, width = picture.shape[:2]
    padded = np.pad(picture, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    y, x = chance.randint(0, 2 * PADDING), chance.randint(0, 2 * PADDING)
    cut = padded[y : y + height, x : x + width]
    return cut[:, ::-1] if chance.random() < 0.5 else cut
