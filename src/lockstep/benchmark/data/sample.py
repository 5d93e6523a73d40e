"""A small ImageNet-like set of photo-like images, drawn by ``scenes.py``.

Each class is one scene; each image is a random part of it at a random scale, so that the classes can be distinguished
and no two images are the same.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.data.example import PictureExample, encode_example
from lockstep.benchmark.data.order import mixed
from lockstep.benchmark.data.records import write_record
from lockstep.benchmark.data.scenes import SCENES, draw
from lockstep.benchmark.data.source import TRAIN, VALIDATION

LAYOUTS = ("tfrecord", "folders")
_SIDES = (256, 500)
_QUALITIES = (75, 95)
_PARTS = (0.5, 0.95)
_VALIDATION_PART = 5
"""One image in this many is held out for evaluation."""

OnPicture = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """What to make."""

    folder: Path
    pictures: int = 400
    files: int = 4
    layout: str = "tfrecord"
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class Made:
    """What was made."""

    train: int
    validation: int
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Picture:
    number: int
    label: int
    name: str
    encoded: bytes


def make_sample(spec: SampleSpec, on_picture: OnPicture) -> Made:
    """Make the set. BadData if Pillow is missing or the folder is not empty."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise BadData("drawing images needs Pillow; install it with 'pip install lockstep-torch[data]'.") from None
    try:
        spec.folder.mkdir(parents=True, exist_ok=True)
        if any(spec.folder.iterdir()):
            raise BadData(f"{spec.folder} is not empty; give a new folder.")
        return _write(spec, on_picture)
    except OSError as error:
        raise BadData(f"{spec.folder} cannot be written ({error.strerror}); give another folder.") from None


def _write(spec: SampleSpec, on_picture: OnPicture) -> Made:
    counts = {TRAIN: 0, VALIDATION: 0}
    write = _write_folders if spec.layout == "folders" else _write_records
    with contextlib.closing(write(spec)) as writer:
        next(writer)
        for done, picture in enumerate(_pictures(spec), start=1):
            split = VALIDATION if picture.number % _VALIDATION_PART == _VALIDATION_PART - 1 else TRAIN
            counts[split] += 1
            writer.send((split, picture))
            on_picture(done, spec.pictures)
    return Made(counts[TRAIN], counts[VALIDATION], tuple(scene.name for scene in SCENES))


Writer = Any
"""Called with (split, image)."""


def _write_records(spec: SampleSpec) -> Writer:
    totals = {TRAIN: spec.files, VALIDATION: max(1, spec.files // 4)}
    with contextlib.ExitStack() as open_files:
        files = {
            split: [
                open_files.enter_context((spec.folder / f"{split}-{number:05d}-of-{total:05d}").open("wb"))
                for number in range(total)
            ]
            for split, total in totals.items()
        }
        while True:
            split, picture = yield
            # TFRecords of ImageNet count classes from 1.
            example = PictureExample(picture.encoded, picture.label + 1, picture.name)
            chosen = files[split][mixed(spec.seed, picture.number) % totals[split]]
            write_record(chosen, encode_example(example))


def _write_folders(spec: SampleSpec) -> Writer:
    while True:
        split, picture = yield
        folder = spec.folder / split / picture.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{picture.number:06d}.jpg").write_bytes(picture.encoded)


def _pictures(spec: SampleSpec) -> Iterator[_Picture]:
    # Not from the spec's seed: a class looks the same in every set.
    originals = [draw(scene, number) for number, scene in enumerate(SCENES)]
    for number in range(spec.pictures):
        # All classes in turn, each in both parts of the set.
        label = (
            number // _VALIDATION_PART % len(originals) if number % _VALIDATION_PART == 4 else number % len(originals)
        )
        chance = random.Random(mixed(spec.seed, number))
        yield _Picture(number, label, SCENES[label].name, _part_of(originals[label], chance))


def _part_of(original: Any, chance: random.Random) -> bytes:
    """A JPEG of a random part of a scene, of a size that is typical for ImageNet."""
    wide = round(original.width * chance.uniform(*_PARTS))
    high = round(original.height * chance.uniform(*_PARTS))
    x, y = chance.randint(0, original.width - wide), chance.randint(0, original.height - high)
    longest = chance.randint(*_SIDES)
    scale = longest / max(wide, high)
    size = (max(1, round(wide * scale)), max(1, round(high * scale)))
    encoded = io.BytesIO()
    original.resize(size, box=(x, y, x + wide, y + high)).save(encoded, "JPEG", quality=chance.randint(*_QUALITIES))
    return encoded.getvalue()
