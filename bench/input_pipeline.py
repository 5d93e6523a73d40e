"""How fast images are prepared (decode, random crop, flip, resize to 224): our processes, a plain Pillow loop, and a
torch DataLoader around Pillow with as many processes. Rounds alternate, so that a busy machine slows all equally.

  python bench/input_pipeline.py [--processes=2] [--rounds=5] [--pictures=1536]
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lockstep.benchmark.data.geometry import random_window
from lockstep.benchmark.data.order import TrainingOrder, mixed
from lockstep.benchmark.data.pipeline import DecodePipeline, InputOptions
from lockstep.benchmark.data.sample import SampleSpec, make_sample
from lockstep.benchmark.data.source import Reader
from lockstep.benchmark.data.tfrecords import TFRecordSource
from lockstep.benchmark.data.transforms import Preparation

SIZE = 224
BATCH = 32
PREFETCH = 4
AHEAD = 2 * PREFETCH


def by_pillow(source: TFRecordSource, reader: Reader, index: int, epoch: int) -> npt.NDArray[np.uint8]:
    """What a person would write: open, crop, resize, flip."""
    picture = reader.read(source.reference(index), source.classes)
    chance = random.Random(mixed(0, epoch, index))
    with Image.open(io.BytesIO(picture.encoded)) as opened:
        whole = opened.convert("RGB")
    window = random_window(whole.width, whole.height, picture.boxes, chance)
    part = whole.crop((window.x, window.y, window.x + window.width, window.y + window.height))
    made = part.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if chance.random() < 0.5:
        made = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(made)


class PillowSet(Dataset[torch.Tensor]):
    """The same for a DataLoader."""

    def __init__(self, source: TFRecordSource) -> None:
        self._source = source
        self._reader = Reader()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(by_pillow(self._source, self._reader, index, 0).copy())


def rate_of(count: int, work: Callable[[], None]) -> float:
    """Images per second."""
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def measure(folder: Path, processes: int, rounds: int, pictures: int) -> dict[str, list[float]]:
    """Rates of each way, round by round. Processes are started and warmed up before the clock runs."""
    source = TFRecordSource(folder, "train")
    order = TrainingOrder(len(source), BATCH, 0, 1, 0)
    ours = DecodePipeline(source, order, Preparation(SIZE), InputOptions(processes=processes, prefetch=PREFETCH))
    loader = DataLoader(
        PillowSet(source), BATCH, shuffle=True, num_workers=processes, persistent_workers=True, drop_last=True
    )
    reader = Reader()
    steps = pictures // BATCH
    per_pass = len(source) // BATCH
    warm = iter(loader)
    for _ in range(per_pass):
        next(warm)
    for _ in range(6):
        ours.next()

    def take_ours(count: int = steps) -> None:
        for _ in range(count):
            ours.next()

    def take_loader() -> None:
        taken = 0
        while taken < steps:
            for _ in loader:
                taken += 1

    def take_plain() -> None:
        for step in range(steps):
            np.stack([by_pillow(source, reader, place.index, place.epoch) for place in order.places(step)])

    loaded = -(-steps // per_pass) * per_pass * BATCH
    rates: dict[str, list[float]] = {"lockstep": [], "DataLoader around Pillow": [], "plain Pillow loop": []}
    try:
        for _ in range(rounds):
            take_ours(AHEAD)  # what was prepared while the others ran costs nothing now, and must not count
            rates["lockstep"].append(rate_of(steps * BATCH, take_ours))
            rates["DataLoader around Pillow"].append(rate_of(loaded, take_loader))
            rates["plain Pillow loop"].append(rate_of(steps * BATCH, take_plain))
    finally:
        ours.close()
        reader.close()
    return rates


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--pictures", type=int, default=1536)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_sample(SampleSpec(folder=Path(folder), pictures=480), lambda _done, _total: None)
        rates = measure(Path(folder), asked.processes, asked.rounds, asked.pictures)
    plain = statistics.median(rates["plain Pillow loop"])
    print(f"images/sec at {SIZE} x {SIZE}, median of {asked.rounds} rounds, {asked.processes} processes")
    for name, of_rounds in rates.items():
        processes = 1 if name.startswith("plain") else asked.processes
        middle = statistics.median(of_rounds)
        print(f"  {name:<26} {processes} process(es): {middle:8.1f}   {middle / plain:4.2f} x the plain loop")


if __name__ == "__main__":
    main()
