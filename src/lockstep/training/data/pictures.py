"""A folder of pictures by class: ``DIR/train/CLASS/*.jpg``, ``DIR/validation/CLASS/*.jpg``; classes count by name."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.training.data.errors import BadData
from lockstep.training.data.source import TRAIN, VALIDATION, Reference

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_FOLDERS = {TRAIN: ("train", "training"), VALIDATION: ("validation", "val", "valid", "test")}


def split_folder(folder: Path, split: str) -> Path | None:
    """Where the pictures of one part of the set lie; None if there is no such folder."""
    return next((folder / name for name in _FOLDERS[split] if (folder / name).is_dir()), None)


def class_names(folder: Path) -> list[str]:
    """The classes of a folder of classes."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def pictures_in(folder: Path) -> list[str]:
    """Pictures of one class by name."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(ENDINGS))


class PictureSource:
    """One part of the set."""

    def __init__(self, folder: Path, split: str) -> None:
        where = split_folder(folder, split)
        if where is None:
            names = " or ".join(str(folder / name) for name in _FOLDERS[split][:2])
            raise BadData(f"found no folder {names}; put one folder for each class there, with its pictures inside.")
        # Both parts count the same classes in the same order, also if one of them lacks pictures of a class.
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
                f"found no pictures in {where}; it needs one folder for each class, with files that end in "
                f"{', '.join(ENDINGS[:3])} or the like."
            )

    def __len__(self) -> int:
        return len(self._paths)

    def reference(self, index: int) -> Reference:
        path, label = self._paths[index]
        return Reference(path, label=label)
