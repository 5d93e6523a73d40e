"""From an encoded image to a model's input: decode, crop, resize, flip, distort colours.

libjpeg-turbo (simplejpeg) and OpenCV do it if they are installed, otherwise Pillow. Decoding uses the smallest scale
of the JPEG transform that still has enough pixels.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.data.errors import BadData, BadRecord
from lockstep.benchmark.data.example import Box
from lockstep.benchmark.data.geometry import Window, middle_window, random_window, scaled
from lockstep.benchmark.data.names import RESIZE_METHODS

Pixels = npt.NDArray[np.uint8]

ENGINES = ("auto", "turbo", "pillow")
PILLOW_FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 256 * 1024 * 1024
"""An image that claims more is refused before memory is allocated for it."""

_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_FROM_YIQ = np.linalg.inv(_YIQ)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How images are prepared; plain data, so that it can be sent to the decoding processes."""

    size: int
    training: bool = True
    distort_colors: bool = False
    resize_method: str = "bilinear"
    engine: str = "auto"
    seed: int = 0


class Engine(Protocol):
    """Decodes and resizes with one library."""

    def size_of(self, encoded: bytes) -> tuple[int, int]:
        """Width and height."""

    def cut_out(
        self, encoded: bytes, window: Window, size: int, method: str, target: Pixels, mirrored: bool = False
    ) -> None:
        """Write a part of the image, resized to ``size`` x ``size``, into ``target``."""


class TurboEngine:
    """libjpeg-turbo and OpenCV; images that are not plain JPEGs go to Pillow."""

    def __init__(self) -> None:
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)  # the images are already spread over processes
        self._cv2: Any = cv2
        self._jpeg: Any = simplejpeg
        self._other = PillowEngine()
        methods = (cv2.INTER_LINEAR, cv2.INTER_NEAREST, cv2.INTER_CUBIC, cv2.INTER_AREA)
        self._methods = dict(zip(RESIZE_METHODS, methods, strict=True))

    def size_of(self, encoded: bytes) -> tuple[int, int]:
        if not self._is_plain(encoded):
            return self._other.size_of(encoded)
        height, width, _, _ = self._jpeg.decode_jpeg_header(encoded)
        return int(width), int(height)

    def cut_out(
        self, encoded: bytes, window: Window, size: int, method: str, target: Pixels, mirrored: bool = False
    ) -> None:
        if not self._is_plain(encoded):
            self._other.cut_out(encoded, window, size, method, target, mirrored)
            return
        height, width, _, _ = self._jpeg.decode_jpeg_header(encoded)
        least = {}
        if min(window.width, window.height) >= 2 * size:
            least = {
                "min_width": math.ceil(width * size / window.width),
                "min_height": math.ceil(height * size / window.height),
                "min_factor": 2,
            }
        try:
            whole = self._jpeg.decode_jpeg(encoded, colorspace="RGB", fastdct=True, fastupsample=True, **least)
        except ValueError as error:
            raise BadRecord(f"the JPEG is damaged ({error})") from None
        high, wide = whole.shape[:2]
        part = scaled(window, wide / width, high / height, wide, high)
        cut = whole[part.y : part.y + part.height, part.x : part.x + part.width]
        made = self._cv2.resize(cut, (size, size), dst=target, interpolation=self._methods[method])
        if made is not target and not np.shares_memory(made, target):
            target[:] = made
        if mirrored:
            self._cv2.flip(target, 1, target)  # numpy would take as long for this as the decoder for the whole image

    def _is_plain(self, encoded: bytes) -> bool:
        if not encoded.startswith(b"\xff\xd8"):
            return False
        try:
            return self._jpeg.decode_jpeg_header(encoded)[2] in ("YCbCr", "Gray", "RGB")
        except ValueError as error:
            raise BadRecord(f"the JPEG is damaged ({error})") from None


class PillowEngine:
    """Pillow: slower, reads PNG too. Its other decoders, dozens of them, are closed to what a data set may contain."""

    def __init__(self) -> None:
        from PIL import Image, UnidentifiedImageError

        self._image: Any = Image
        self._errors = (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError)
        resampling = Image.Resampling
        methods = (resampling.BILINEAR, resampling.NEAREST, resampling.BICUBIC, resampling.BOX)
        self._methods = dict(zip(RESIZE_METHODS, methods, strict=True))

    def size_of(self, encoded: bytes) -> tuple[int, int]:
        try:
            with self._image.open(io.BytesIO(encoded), formats=PILLOW_FORMATS) as picture:
                width, height = picture.size
        except self._errors as error:
            raise BadRecord(f"it is not a readable image ({error})") from None
        return int(width), int(height)

    def cut_out(
        self, encoded: bytes, window: Window, size: int, method: str, target: Pixels, mirrored: bool = False
    ) -> None:
        try:
            with self._image.open(io.BytesIO(encoded), formats=PILLOW_FORMATS) as picture:
                width, height = picture.size
                if min(window.width, window.height) >= 2 * size:
                    picture.draft(
                        "RGB", (math.ceil(width * size / window.width), math.ceil(height * size / window.height))
                    )
                whole = picture.convert("RGB")
        except self._errors as error:
            raise BadRecord(f"the image is damaged ({error})") from None
        part = scaled(window, whole.width / width, whole.height / height, whole.width, whole.height)
        box = (part.x, part.y, part.x + part.width, part.y + part.height)
        made = whole.resize((size, size), self._methods[method], box=box)
        target[:] = np.asarray(made.transpose(self._image.Transpose.FLIP_LEFT_RIGHT) if mirrored else made)


def make_engine(name: str) -> Engine:
    """The requested engine; ``auto`` selects the fastest one that is installed."""
    if name in ("auto", "turbo"):
        try:
            return TurboEngine()
        except ImportError:
            if name == "turbo":
                raise BadData(
                    "libjpeg-turbo or OpenCV is not installed; install both with 'pip install lockstep-torch[data]'."
                ) from None
    try:
        return PillowEngine()
    except ImportError:
        raise BadData(
            "reading images needs a decoder, but none is installed; run 'pip install lockstep-torch[data]'."
        ) from None


def prepare(
    encoded: bytes, boxes: Sequence[Box], how: Preparation, engine: Engine, chance: random.Random, target: Pixels
) -> None:
    """Write one prepared image into ``target`` (size x size x 3). BadRecord if it cannot be decoded."""
    width, height = engine.size_of(encoded)
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadRecord(f"its size of {width} x {height} pixels is out of range")
    if not how.training:
        engine.cut_out(encoded, middle_window(width, height), how.size, how.resize_method, target)
        return
    window = random_window(width, height, boxes, chance)
    engine.cut_out(encoded, window, how.size, how.resize_method, target, mirrored=chance.random() < 0.5)
    if how.distort_colors:
        distort_colors(target, chance)


def distort_colors(pixels: Pixels, chance: random.Random) -> None:
    """Random brightness, saturation, hue and contrast, in the ranges of tf_cnn_benchmarks, in place.

    In the YIQ space a change of hue is a rotation and a change of saturation a scaling, so one matrix does both.
    """
    brightness = chance.uniform(-32.0, 32.0)
    saturation = chance.uniform(0.5, 1.5)
    hue = chance.uniform(-0.2, 0.2) * math.pi
    contrast = chance.uniform(0.5, 1.5)
    turned = saturation * np.array([[math.cos(hue), -math.sin(hue)], [math.sin(hue), math.cos(hue)]])
    change = np.eye(3)
    change[1:, 1:] = turned
    matrix = (_FROM_YIQ @ change @ _YIQ).astype(np.float32)
    colors = (pixels.astype(np.float32) + brightness) @ matrix.T
    middle = colors.mean(axis=(0, 1), keepdims=True)
    np.clip((colors - middle) * contrast + middle, 0, 255, out=colors)
    pixels[:] = colors.round().astype(np.uint8)
