"""ImageNet as TFRecord files: ``train-00000-of-01024`` and ``validation-00000-of-00128`` in one folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.data.records import ByteRange, index_records
from lockstep.benchmark.data.source import Reference

CLASSES = 1001
"""1000 classes, numbered from 1; 0 is the background."""

_NAME = re.compile(r"(train|validation)-(\d+)-of-(\d+)")
_THREADS = 8

OnFile = Callable[[int, int], None]
"""Called with (files done, total files)."""


def record_files(folder: Path, split: str) -> list[Path]:
    """The files of one part of the set, in order of their numbers."""
    found = [path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and match[1] == split]
    return sorted(found)


def missing_files(files: list[Path]) -> list[str]:
    """The names of files that are missing according to the "-of-" numbers."""
    missing = []
    for total_text in sorted({path.name.rpartition("-of-")[2] for path in files}):
        of_this = {path.name for path in files if path.name.endswith(f"-of-{total_text}")}
        prefix, digits, _ = next(iter(of_this)).split("-", 2)
        names = (f"{prefix}-{number:0{len(digits)}d}-of-{total_text}" for number in range(int(total_text)))
        missing += [name for name in names if name not in of_this]
    return missing


class TFRecordSource:
    """One part of the set, with the location of every record."""

    classes = CLASSES

    def __init__(self, folder: Path, split: str, on_file: OnFile | None = None) -> None:
        """Reads the headers of all records, several files at once; ``on_file`` is called after each file."""
        self.files = record_files(folder, split)
        if not self.files:
            raise BadData(
                f"found no files in --data_dir matching: {folder}/{split}-*-of-*; "
                "'lockstep data sample DIR' creates a small set in the right format."
            )
        spans = self._index(on_file)
        numbers = [np.full(len(found), number, np.int32) for number, found in enumerate(spans)]
        self._file = np.concatenate(numbers)
        self._offset = np.array([span.offset for found in spans for span in found], np.int64)
        self._length = np.array([span.length for found in spans for span in found], np.int64)
        if not len(self._file):
            raise BadData(f"the {len(self.files)} files {folder}/{split}-*-of-* contain no records; create them again.")

    def _index(self, on_file: OnFile | None) -> list[list[ByteRange]]:
        spans: list[list[ByteRange]] = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="index") as pool:
            try:
                for found in pool.map(index_records, self.files):
                    spans.append(found)
                    if on_file is not None:
                        on_file(len(spans), len(self.files))
            except BadData:
                pool.shutdown(cancel_futures=True)
                raise
        return spans

    def __len__(self) -> int:
        return len(self._file)

    def reference(self, index: int) -> Reference:
        return Reference(
            str(self.files[self._file[index]]), offset=int(self._offset[index]), length=int(self._length[index])
        )
