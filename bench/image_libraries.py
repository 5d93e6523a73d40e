"""What OpenCV earns: the same images prepared (decode, random crop, resize, flip) with it and without it.

First per image, in one process: libjpeg-turbo decodes for all but Pillow, and another library resizes and flips. Then
in the real input pipeline, whose processes can use either engine. Rounds alternate; each ratio is of two neighbours in
one round, so that a busy machine slows both.

  python bench/image_libraries.py [--size=224] [--rounds=7] [--pictures=200] [--batches=40]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from lockstep.benchmark.data.geometry import Window
from lockstep.benchmark.data.order import TrainingOrder
from lockstep.benchmark.data.pipeline import DecodePipeline, InputOptions
from lockstep.benchmark.data.sample import SampleSpec, make_sample
from lockstep.benchmark.data.source import Reader
from lockstep.benchmark.data.tfrecords import TFRecordSource
from lockstep.benchmark.data.transforms import Engine, PillowEngine, Pixels, Preparation, TurboEngine, prepare

Resize = Callable[[Pixels, Pixels, bool], None]
"""Called with the part to resize, where it goes, and whether it is mirrored."""


def by_pillow(cut: Pixels, target: Pixels, mirrored: bool) -> None:
    made = Image.fromarray(cut).resize(target.shape[1::-1], Image.Resampling.BILINEAR)
    target[:] = np.asarray(made.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else made)


def by_torch(cut: Pixels, target: Pixels, mirrored: bool) -> None:
    planes = torch.from_numpy(cut).permute(2, 0, 1).unsqueeze(0)
    made = functional.interpolate(planes, target.shape[:2], mode="bilinear")[0].permute(1, 2, 0)
    torch.from_numpy(target).copy_(made.flip(1) if mirrored else made)


def by_numpy(cut: Pixels, target: Pixels, mirrored: bool) -> None:
    """In whole numbers: floats take twice as long."""
    (high, wide), (size_y, size_x) = cut.shape[:2], target.shape[:2]
    y = ((np.arange(size_y) + 0.5) * high / size_y - 0.5).clip(0, high - 1)
    x = ((np.arange(size_x) + 0.5) * wide / size_x - 0.5).clip(0, wide - 1)
    x = x[::-1] if mirrored else x
    top, left = y.astype(int), x.astype(int)
    down = ((y - top) * 128).astype(np.int16)[:, np.newaxis, np.newaxis]
    right = ((x - left) * 128).astype(np.int16)[np.newaxis, :, np.newaxis]
    upper = cut.take(top, 0).astype(np.int16)
    rows = upper + (((cut.take(np.minimum(top + 1, high - 1), 0) - upper) * down) >> 7)
    first = rows.take(left, 1)
    target[:] = first + (((rows.take(np.minimum(left + 1, wide - 1), 1) - first) * right) >> 7)


class Without(TurboEngine):
    """libjpeg-turbo, and another library in OpenCV's place, which mirrors while it resizes if it can."""

    def __init__(self, resize: Resize) -> None:
        super().__init__()
        self._replaced = _Replaced(resize)
        self._cv2 = self._replaced

    def cut_out(
        self, encoded: bytes, window: Window, size: int, method: str, target: Pixels, mirrored: bool = False
    ) -> None:
        self._replaced.mirrored = mirrored
        super().cut_out(encoded, window, size, method, target)


class _Replaced:
    """The call of OpenCV that the engine makes."""

    mirrored = False

    def __init__(self, resize: Resize) -> None:
        self._resize = resize

    def resize(self, cut: Pixels, _size: tuple[int, int], dst: Pixels, interpolation: int) -> Pixels:
        assert interpolation >= 0
        self._resize(cut, dst, self.mirrored)
        return dst


def per_image(encoded: list[bytes], size: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of processor time per image, round by round."""
    engines: dict[str, Engine] = {
        "libjpeg-turbo and OpenCV": TurboEngine(),
        "libjpeg-turbo and torch": Without(by_torch),
        "libjpeg-turbo and Pillow": Without(by_pillow),
        "libjpeg-turbo and numpy": Without(by_numpy),
        "Pillow alone": PillowEngine(),
    }
    spent: dict[str, list[float]] = {name: [] for name in engines}
    target = np.zeros((size, size, 3), np.uint8)
    for turn in range(-1, rounds):
        for name, engine in engines.items():
            chance = random.Random(turn)
            begin = time.process_time()
            for one in encoded:
                prepare(one, (), Preparation(size), engine, chance, target)
            if turn >= 0:  # the one before warms up
                spent[name].append((time.process_time() - begin) / len(encoded) * 1e6)
    return spent


def in_pipeline(source: TFRecordSource, size: int, rounds: int, batches: int) -> dict[str, list[float]]:
    """Images per second of the real pipeline with each engine, round by round."""
    batch, prefetch = 32, 4
    order = TrainingOrder(len(source), batch, 0, 1, 0)
    rates: dict[str, list[float]] = {"turbo": [], "pillow": []}
    for _ in range(rounds):
        for name, of_rounds in rates.items():
            pipeline = DecodePipeline(
                source, order, Preparation(size, engine=name), InputOptions(processes=2, prefetch=prefetch)
            )
            try:
                for _ in range(2 * prefetch):
                    pipeline.next()
                begin = time.perf_counter()
                for _ in range(batches):
                    pipeline.next()
                of_rounds.append(batches * batch / (time.perf_counter() - begin))
            finally:
                pipeline.close()
    return rates


def show(title: str, unit: str, values: dict[str, list[float]]) -> None:
    """Each with its ratio to the first, median and spread over the rounds."""
    print(title)
    first = next(iter(values.values()))
    for name, of_rounds in values.items():
        ratios = [one / other for one, other in zip(of_rounds, first, strict=True)]
        print(
            f"  {name:<26} {statistics.median(of_rounds):7.0f} {unit}"
            f"   {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", type=int, default=224)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--pictures", type=int, default=200)
    arguments.add_argument("--batches", type=int, default=40)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_sample(SampleSpec(folder=Path(folder), pictures=asked.pictures), lambda _done, _total: None)
        source = TFRecordSource(Path(folder), "train")
        reader = Reader()
        encoded = [reader.read(source.reference(index), source.classes).encoded for index in range(len(source))]
        reader.close()
        spent = per_image(encoded, asked.size, asked.rounds)
        show(f"processor time per image at {asked.size} x {asked.size}", "µs", spent)
        rates = in_pipeline(source, asked.size, asked.rounds, asked.batches)
        show("the input pipeline, 2 processes", "images/s", rates)


if __name__ == "__main__":
    main()
