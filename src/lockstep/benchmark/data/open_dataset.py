"""Opens the data set that ``--data_name`` and ``--data_dir`` ask for; problems are reported before anything starts."""

from __future__ import annotations

from pathlib import Path

from lockstep.benchmark.data import pictures, tfrecords
from lockstep.benchmark.data.cifar import cifar_folder, cifar_source
from lockstep.benchmark.data.digits import digits_source
from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.data.names import CIFAR10, DIGITS, IMAGENET, PICTURES
from lockstep.benchmark.data.source import SPLITS, TRAIN, Source
from lockstep.benchmark.data.tfrecords import OnFile, TFRecordSource

_LOOKS_LIKE = {
    IMAGENET: "TFRecord files of images (train-00000-of-00008)",
    CIFAR10: "the Python batches of CIFAR-10",
    PICTURES: "one folder of images per class (train/CLASS/*.jpg)",
}


def kind_of(folder: Path) -> str | None:
    """Which data set a folder holds, judged by its content; None if it is not one that is known."""
    if any(tfrecords.record_files(folder, split) for split in SPLITS):
        return IMAGENET
    if cifar_folder(folder) is not None:
        return CIFAR10
    for split in SPLITS:
        where = pictures.split_folder(folder, split)
        if where is not None and pictures.class_names(where):
            return PICTURES
    return None


def recognised(folder: str, name: str | None) -> str:
    """The name of the data set in a folder. BadData if there is none, or a different one than ``name``."""
    if name == DIGITS:
        raise BadData("--data_name=digits is built in; leave out --data_dir.")
    path = Path(folder)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise BadData(f"--data_dir={folder} {what}; 'lockstep data sample DIR' creates a small set to start with.")
    try:
        found = kind_of(path)
    except OSError as error:
        raise BadData(f"--data_dir={folder} cannot be read ({error.strerror}); check its permissions.") from None
    if found is None:
        known = "; ".join(_LOOKS_LIKE.values())
        raise BadData(f"--data_dir={folder} does not hold a known data set; give a folder with one of: {known}.")
    if name is not None and name != found:
        raise BadData(
            f"--data_name={name} was asked for, but --data_dir={folder} holds {_LOOKS_LIKE[found]}; "
            f"give --data_name={found}, or leave it out."
        )
    return found


def open_source(name: str, folder: str | None, split: str = TRAIN, on_file: OnFile | None = None) -> Source:
    """The data set; BadData if it cannot be used."""
    if name == DIGITS:
        return digits_source(split)
    assert folder is not None
    recognised(folder, name)
    path = Path(folder)
    if name == CIFAR10:
        return cifar_source(path, split)
    if name == PICTURES:
        return pictures.PictureSource(path, split)
    return TFRecordSource(path, split, on_file)
