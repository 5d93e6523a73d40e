"""CIFAR-10 from its Python pickles, read by an unpickler that creates only arrays and plain values.

A pickle is a program. Ours may use only three names, all for numpy arrays; any other name is refused and not
imported.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.data.source import TRAIN, ArraySource

CLASSES = 11
"""Ten classes plus one, as tf_cnn_benchmarks counts them."""
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
SUBFOLDER = "cifar-10-batches-py"
SIDE = 32
MAX_FILE_BYTES = 256 << 20

_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
_LATIN_1 = ("_codecs", "encode")
"""How Python 3 writes bytes in the old format that these files use."""


_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(MemoryError, OverflowError, RecursionError),
)
"""What reading a damaged file raises: a length in it may be any number, and lists may lie in lists without end."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _LATIN_1:
            return _encode_latin_1
        if (module, name) in _ALLOWED:
            return _numpy_name(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images do not need")


def _encode_latin_1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


def _numpy_name(name: str) -> Any:
    if name == "_reconstruct":
        from numpy._core import multiarray

        return multiarray._reconstruct  # this is how numpy itself restores an array
    return np.ndarray if name == "ndarray" else np.dtype


def read_pickle(data: bytes) -> Any:
    """The plain value of a pickle; pickle.UnpicklingError if it holds anything else."""
    value = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    _refuse_objects(value)
    return value


def _refuse_objects(value: Any) -> None:
    if isinstance(value, dict):
        for key, held in value.items():
            _refuse_objects(key)
            _refuse_objects(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            _refuse_objects(held)
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise pickle.UnpicklingError("it holds an array of objects")
    elif not isinstance(value, (bytes, str, int, float, type(None))):
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__}")


def cifar_folder(folder: Path) -> Path | None:
    """The folder with the batches: this one or the one that the archive unpacks to; None if neither has them."""
    return next((place for place in (folder, folder / SUBFOLDER) if (place / TRAIN_FILES[0]).exists()), None)


def read_batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (n, 32, 32, 3) and labels of one file; BadData names the file and what is wrong with it."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadData(f"{path} is larger than any batch of CIFAR-10; unpack the archive again.")
        content = read_pickle(path.read_bytes())
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); unpack the archive again.") from None
    except BadData:
        raise
    except _DAMAGED as error:
        raise BadData(f"{path} is refused: {error or 'it is cut off'}; unpack the archive again.") from None
    return _pictures_of(path, content)


def _pictures_of(path: Path, content: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    content = content if isinstance(content, dict) else {}
    data, labels = content.get(b"data"), content.get(b"labels")
    right = (
        isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == SIDE * SIDE * 3
    )
    if not right or not isinstance(labels, list) or len(labels) != len(data):
        raise BadData(f"{path} lacks CIFAR-10's arrays 'data' and 'labels'; unpack the archive again.")
    if not all(isinstance(label, int) and 0 <= label < 10 for label in labels):
        raise BadData(f"{path} has labels that are not between 0 and 9; unpack the archive again.")
    pixels = data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), np.array(labels, np.int64)


def cifar_source(folder: Path, split: str) -> ArraySource:
    """All images of one part of the set, in memory."""
    place = cifar_folder(folder)
    if place is None:
        raise BadData(
            f"{TRAIN_FILES[0]} is in neither {folder} nor {folder / SUBFOLDER}; "
            "unpack the Python version of CIFAR-10 there."
        )
    batches = [read_batch(place / name) for name in (TRAIN_FILES if split == TRAIN else TEST_FILES)]
    return ArraySource(
        np.concatenate([pixels for pixels, _ in batches]), np.concatenate([labels for _, labels in batches]), CLASSES
    )
