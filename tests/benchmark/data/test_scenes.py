"""The drawn images of ``lockstep data sample``: photo-like to a decoder, and the same every time."""

from __future__ import annotations

import hashlib
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.benchmark.data.sample import SampleSpec, make_sample
from lockstep.benchmark.data.scenes import SCENES, Scene, draw

SIDE = 256


def _slope(picture: Image.Image) -> float:
    """How power falls with frequency, as an exponent; about -2 in photographs."""
    grey = np.asarray(picture.convert("L"), np.float64)[:SIDE, :SIDE]
    faded = (grey - grey.mean()) * np.outer(np.hanning(SIDE), np.hanning(SIDE))
    power = np.abs(np.fft.rfft2(faded)) ** 2
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, np.newaxis], np.fft.rfftfreq(SIDE)[np.newaxis])
    edges = np.geomspace(4 / SIDE, 0.45, 12)
    means = [power[(frequency >= low) & (frequency < high)].mean() for low, high in itertools.pairwise(edges)]
    return float(np.polyfit(np.log(edges[:-1]), np.log(means), 1)[0])


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_scene_has_the_spectrum_and_the_bytes_of_a_photograph(scene: Scene) -> None:
    picture = draw(scene, SCENES.index(scene))
    assert -3.4 < _slope(picture) < -1.4
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=85)
    assert 0.8 < 8 * len(out.getvalue()) / (picture.width * picture.height) < 4


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def test_the_same_seed_makes_the_same_set_and_another_one_another(tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        make_sample(SampleSpec(folder=folder, pictures=16, files=1, seed=seed), lambda _done, _total: None)
        digests.append(_digest(folder))
    assert digests[0] == digests[1] != digests[2]
