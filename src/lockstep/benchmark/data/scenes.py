"""Pictures that are drawn, not photographed, and cost a decoder what photographs cost.

What makes a JPEG of a photograph slow to decode is its spectrum: power falls with about the square of the frequency,
and edges are everywhere. Opaque shapes of all sizes that hide one another have that spectrum (the "dead leaves" model
of natural images); noise of the same spectrum gives each surface its texture, and grain is what a sensor adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Plane = npt.NDArray[np.float64]
Color = tuple[int, int, int]

SIZE = (640, 480)
"""Width and height, as of the photographs in ImageNet before they are cut to size."""
_GRAIN = 1.2
_SMALLEST = 4.0
_LARGEST = 110.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One class of pictures."""

    name: str
    above: Color
    below: Color
    """The background runs from one colour to the other."""
    shapes: tuple[Color, ...]
    count: int
    stretch: float = 1.0
    """Width of a shape relative to its height."""
    corners: int = 0
    """Of each shape; none: ellipses."""
    horizon: float = 0.0
    """No shape lies above this fraction of the height."""
    texture: float = 14.0
    turned: bool = True


SCENES = (
    Scene("bricks", (120, 70, 55), (150, 90, 70), ((168, 84, 60), (142, 66, 48), (190, 110, 84)), 900, 2.4, 4,
          turned=False),
    Scene("clouds", (60, 110, 190), (190, 215, 240), ((235, 238, 243), (212, 220, 232), (248, 248, 250)), 120, 2.2,
          texture=20.0),
    Scene("dunes", (140, 180, 220), (214, 170, 110), ((222, 180, 120), (190, 140, 84), (160, 110, 62)), 260, 4.0,
          horizon=0.4),
    Scene("flowers", (40, 80, 36), (62, 110, 50), ((208, 56, 92), (240, 200, 60), (224, 224, 236), (70, 120, 52)),
          1500),
    Scene("forest", (24, 40, 22), (40, 56, 28), ((46, 84, 36), (78, 108, 44), (30, 52, 26), (92, 74, 48)), 2400, 0.5),
    Scene("night", (6, 8, 22), (18, 18, 40), ((30, 30, 58), (250, 226, 160), (20, 22, 44), (120, 140, 220)), 700, 0.7,
          4, horizon=0.3, texture=9.0, turned=False),
    Scene("pebbles", (110, 106, 100), (90, 88, 84), ((150, 144, 136), (108, 100, 92), (186, 182, 176), (74, 70, 70)),
          2000, 1.3),
    Scene("sea", (150, 190, 214), (18, 60, 92), ((28, 92, 124), (56, 124, 148), (16, 58, 90), (200, 220, 226)), 1600,
          5.0, horizon=0.35),
)  # fmt: skip


def draw(scene: Scene, seed: int) -> Any:
    """The picture (Pillow's, RGB) of a scene; the same one for the same seed."""
    from PIL import Image, ImageDraw

    # RandomState, because numpy keeps its numbers the same in all versions.
    chance = np.random.RandomState(seed)
    width, height = SIZE
    down = np.linspace(0.0, 1.0, height)[:, np.newaxis, np.newaxis]
    sky = (1 - down) * np.array(scene.above) + down * np.array(scene.below)
    picture = Image.fromarray(np.broadcast_to(sky, (height, width, 3)).round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(scene.count):
        color = np.array(scene.shapes[chance.randint(len(scene.shapes))]) + chance.uniform(-22, 22)
        pen.polygon(_outline(scene, chance), fill=tuple(int(part) for part in color.clip(0, 255)))
    light = _noise(chance, width, height) * scene.texture
    colors = _noise(chance, width, height) * scene.texture / 4
    tint = np.stack([colors, np.zeros_like(colors), -colors], axis=-1)
    grain = chance.normal(0, _GRAIN, (height, width, 3))
    pixels = np.asarray(picture, np.float64) + light[..., np.newaxis] + tint + grain
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def _outline(scene: Scene, chance: np.random.RandomState) -> list[tuple[float, float]]:
    """The corners of one shape. Radii follow r**-3, so that the picture looks alike at every scale."""
    width, height = SIZE
    smallest, largest = _SMALLEST**-2, _LARGEST**-2
    radius = (smallest - chance.uniform() * (smallest - largest)) ** -0.5
    x = chance.uniform(0, width)
    y = chance.uniform(scene.horizon, 1) * height
    corners = scene.corners or 24
    tilt = chance.uniform(-0.4, 0.4) if scene.turned else 0.0
    across, along = radius * math.sqrt(scene.stretch), radius / math.sqrt(scene.stretch)
    points = []
    for number in range(corners):
        angle = 2 * math.pi * (number + 0.5) / corners
        right, down = across * math.cos(angle), along * math.sin(angle)
        points.append((
            x + right * math.cos(tilt) - down * math.sin(tilt),
            y + right * math.sin(tilt) + down * math.cos(tilt),
        ))  # fmt: skip
    return points


def _noise(chance: np.random.RandomState, width: int, height: int) -> Plane:
    """Noise whose amplitude falls with the frequency, with a standard deviation of 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, np.newaxis], np.fft.rfftfreq(width)[np.newaxis, :])
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(chance.normal(size=(height, width))) / frequency
    spectrum[0, 0] = 0.0
    plane: Plane = np.fft.irfft2(spectrum, s=(height, width))
    plane /= plane.std()
    return plane
