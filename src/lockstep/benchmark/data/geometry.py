"""Which part of an image is used: pure arithmetic on sizes.

Training takes a random box as tf_cnn_benchmarks does: 5 % to 100 % of the area, between 3:4 and 4:3, with at least a
tenth of one of the marked objects in it. Evaluation takes the middle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.benchmark.data.example import Box

ASPECTS = (0.75, 1.33)
AREAS = (0.05, 1.0)
ATTEMPTS = 100
MIN_COVERED = 0.1
EVALUATION_MARGIN = 1.145
"""Evaluation resizes an image to this multiple of the model's size and takes the middle."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of an image, in pixels."""

    x: int
    y: int
    width: int
    height: int


def random_window(width: int, height: int, boxes: Sequence[Box], chance: random.Random) -> Window:
    """A random part of an image; the whole image if the allowed attempts find none that fits."""
    for _ in range(ATTEMPTS):
        aspect = chance.uniform(*ASPECTS)
        area = chance.uniform(*AREAS) * width * height
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if not (0 < wide <= width and 0 < high <= height):
            continue
        window = Window(chance.randint(0, width - wide), chance.randint(0, height - high), wide, high)
        if not boxes or any(_covered(window, width, height, box) >= MIN_COVERED for box in boxes):
            return window
    return Window(0, 0, width, height)


def _covered(window: Window, width: int, height: int, box: Box) -> float:
    """The fraction of a marked object that lies in the window."""
    x0, y0, x1, y1 = box[0] * width, box[1] * height, box[2] * width, box[3] * height
    area = (x1 - x0) * (y1 - y0)
    if area <= 0:
        return 0.0
    wide = min(x1, window.x + window.width) - max(x0, window.x)
    high = min(y1, window.y + window.height) - max(y0, window.y)
    return max(0.0, wide) * max(0.0, high) / area


def middle_window(width: int, height: int) -> Window:
    """The middle square that evaluation uses."""
    side = max(1, round(min(width, height) / EVALUATION_MARGIN))
    return Window((width - side) // 2, (height - side) // 2, side, side)


def scaled(window: Window, factor_x: float, factor_y: float, width: int, height: int) -> Window:
    """The same part of the image at another scale, at least one pixel, inside ``width`` x ``height``."""
    x = min(int(window.x * factor_x), width - 1)
    y = min(int(window.y * factor_y), height - 1)
    right = min(max(math.ceil((window.x + window.width) * factor_x), x + 1), width)
    bottom = min(max(math.ceil((window.y + window.height) * factor_y), y + 1), height)
    return Window(x, y, right - x, bottom - y)
