"""One folder of images per class: ``DIR/train/CLASS/*.jpg``, ``DIR/validation/CLASS/*.jpg``, numbered by name."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.data.source import TRAIN, VALIDATION, Reference

ENDINGS = (".jpg", ".jpeg", ".png")
_NOT_READ = (".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
"""Images too, but their decoders are closed to what a data set may contain (``transforms.PILLOW_FORMATS``)."""
_FOLDERS = {TRAIN: ("train", "training"), VALIDATION: ("validation", "val", "valid", "test")}


def split_folder(folder: Path, split: str) -> Path | None:
    """The folder with the images of one part of the set; None if there is none."""
    return next((folder / name for name in _FOLDERS[split] if (folder / name).is_dir()), None)


def class_names(folder: Path) -> list[str]:
    """The classes in a folder."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def pictures_in(folder: Path) -> list[str]:
    """The images of one class, sorted by name; BadData if some are in formats that are not read."""
    names = sorted(entry.name for entry in os.scandir(folder))
    refused = next((name for name in names if name.lower().endswith(_NOT_READ)), None)
    if refused is not None:
        raise BadData(f"{folder / refused} is neither JPEG nor PNG; convert it, or move it away.")
    return [name for name in names if name.lower().endswith(ENDINGS)]


class PictureSource:
    """One part of the set."""

    def __init__(self, folder: Path, split: str) -> None:
        where = split_folder(folder, split)
        if where is None:
            names = " or ".join(str(folder / name) for name in _FOLDERS[split][:2])
            raise BadData(f"there is no folder {names}; create it, with one folder of images per class inside.")
        # Both parts number the same classes in the same order, even if one of them lacks images of a class.
        trained = split_folder(folder, TRAIN) or where
        self.names = class_names(trained)
        strangers = sorted(set(class_names(where)) - set(self.names))
        if strangers:
            raise BadData(f"{where} has classes that {trained} lacks: {', '.join(strangers[:5])}; add or rename them.")
        self.classes = len(self.names)
        self._paths: list[tuple[str, int]] = []
        for label, name in enumerate(self.names):
            of_class = where / name
            if of_class.is_dir():
                self._paths += [(str(of_class / picture), label) for picture in pictures_in(of_class)]
        if not self._paths:
            raise BadData(
                f"there are no images in {where}; it needs one folder per class, with files that end in "
                f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}."
            )

    def __len__(self) -> int:
        return len(self._paths)

    def reference(self, index: int) -> Reference:
        path, label = self._paths[index]
        return Reference(path, label=label)
