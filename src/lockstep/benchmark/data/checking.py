"""Check every record of a data set: framing, checksums, features, labels, and whether each image decodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from lockstep.benchmark.data.errors import BadData, BadRecord
from lockstep.benchmark.data.names import IMAGENET, PICTURES
from lockstep.benchmark.data.open_dataset import open_source, recognised
from lockstep.benchmark.data.pictures import split_folder
from lockstep.benchmark.data.source import SPLITS, ArraySource, EncodedSource, Reader
from lockstep.benchmark.data.tfrecords import missing_files, record_files
from lockstep.benchmark.data.transforms import Engine, Preparation, make_engine, prepare

_SIZE = 64
_GROUP = 256

OnRecord = Callable[[str, int, int], None]
"""Called with (part of the set, records done, total records)."""


@dataclass(slots=True)
class PartReport:
    """What was found in one part of a set."""

    split: str
    records: int = 0
    labels: Counter[int] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that are missing according to the names of the others."""


@dataclass(slots=True)
class DataSetReport:
    """What was found in a set."""

    name: str
    parts: list[PartReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(not part.bad and not part.missing for part in self.parts)


def check_set(folder: str, threads: int, on_record: OnRecord) -> DataSetReport:
    """Check everything. BadData if it is not a data set at all, or a file's framing is broken."""
    name = recognised(folder, None)
    report = DataSetReport(name)
    for split in SPLITS:
        if not _has(name, Path(folder), split):
            continue
        report.parts.append(_check_part(name, folder, split, threads, on_record))
    return report


def _has(name: str, folder: Path, split: str) -> bool:
    if name == IMAGENET:
        return bool(record_files(folder, split))
    return name != PICTURES or split_folder(folder, split) is not None


def _check_part(name: str, folder: str, split: str, threads: int, on_record: OnRecord) -> PartReport:
    part = PartReport(split)
    if name == IMAGENET:
        part.missing = missing_files(record_files(Path(folder), split))
    try:
        source = open_source(name, folder, split)
    except BadData as error:
        part.bad.append(str(error))
        return part
    part.records = len(source)
    if isinstance(source, ArraySource):
        part.labels.update(source.labels.tolist())
        on_record(split, part.records, part.records)
        return part
    _check_records(part, source, threads, on_record)
    return part


def _check_records(part: PartReport, source: EncodedSource, threads: int, on_record: OnRecord) -> None:
    engine = make_engine("auto")
    with ThreadPoolExecutor(threads, thread_name_prefix="check") as pool:
        indices = iter(range(len(source)))
        done = 0
        # In groups, so that a large set is not held in memory as a list of pending work.
        while group := list(islice(indices, _GROUP)):
            for label, problem in pool.map(lambda index: _look(source, index, engine), group):
                done += 1
                if problem:
                    part.bad.append(problem)
                else:
                    part.labels[label] += 1
                on_record(part.split, done, len(source))


def _look(source: EncodedSource, index: int, engine: Engine) -> tuple[int, str]:
    reference = source.reference(index)
    reader = Reader()
    try:
        picture = reader.read(reference, source.classes)
        target = np.empty((_SIZE, _SIZE, 3), np.uint8)
        prepare(picture.encoded, picture.boxes, Preparation(_SIZE, training=False), engine, random.Random(0), target)
    except BadRecord as error:
        return -1, f"{reference}: {error}"
    finally:
        reader.close()
    return picture.label, ""
