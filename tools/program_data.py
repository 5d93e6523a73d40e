"""Small real data for programs that would otherwise download some: a text, and handwritten digits."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np

from lockstep.benchmark.data.digits import load_digits

WHO = ("the coordinator", "a worker", "the first server", "every rank", "nobody", "a monitor", "the chief")
DOES = ("waits for", "averages", "sends", "names", "loses", "checks", "keeps")
WHAT = ("a gradient", "the last bucket", "its parameters", "the slowest link", "two versions", "a step", "the key")

TORCHVISION = '''"""Stands in for torchvision: digits in the size of MNIST's."""
'''

DATASETS = '''"""1,797 handwritten digits, as large as MNIST's."""
import os

import numpy as np


class MNIST:
    def __init__(self, root, train=True, download=False, transform=None):
        with np.load(os.path.join(os.path.dirname(__file__), "digits.npz")) as data:
            images, labels = data["images"], data["labels"]
        held_out = len(labels) // 5
        part = slice(held_out, None) if train else slice(held_out)
        self.images, self.labels, self.transform = images[part], labels[part], transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])
'''

TRANSFORMS = '''"""What programs do with MNIST."""
import torch


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image).float().div(255).unsqueeze(0)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image):
        return (image - self.mean) / self.std


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image
'''


def write_data(folder: Path) -> None:
    """Whatever any of the programs looks for, below this folder."""
    own = folder / "data" / "own"
    own.mkdir(parents=True)
    _write_text(own)
    _write_digits(folder / "torchvision")


def sentences(count: int, seed: int) -> list[str]:
    """The same for the same seed."""
    chosen = random.Random(seed)
    return [" ".join((chosen.choice(WHO), chosen.choice(DOES), chosen.choice(WHAT), ".")) for _ in range(count)]


def _write_text(own: Path) -> None:
    """By words for word_language_model, by characters for nanoGPT."""
    parts = {"train": sentences(400, 0), "valid": sentences(60, 1), "test": sentences(60, 2)}
    for name, lines in parts.items():
        (own / f"{name}.txt").write_text("\n".join(lines) + "\n")
    characters = sorted(set("\n".join(line for lines in parts.values() for line in lines)))
    numbers = {character: number for number, character in enumerate(characters)}
    for name, part in (("train", "train"), ("val", "valid")):
        codes = [numbers[character] for character in "\n".join(parts[part])]
        np.array(codes, dtype=np.uint16).tofile(own / f"{name}.bin")
    with (own / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": len(characters), "stoi": numbers, "itos": dict(enumerate(characters))}, file)


def _write_digits(package: Path) -> None:
    package.mkdir()
    images, labels = load_digits()
    large = np.kron(images.astype(np.uint8) * 15, np.ones((3, 3), dtype=np.uint8))
    np.savez(package / "digits.npz", images=np.pad(large, ((0, 0), (2, 2), (2, 2))), labels=labels)
    (package / "__init__.py").write_text(TORCHVISION)
    (package / "datasets.py").write_text(DATASETS)
    (package / "transforms.py").write_text(TRANSFORMS)
