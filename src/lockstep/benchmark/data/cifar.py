"""CIFAR-10 from its Python pickles, read by an unpickler that creates only arrays of bytes and plain values.

A pickle is a program, and nobody knows who wrote this one. It may use only four names; what they stand for here is
ours, and numpy sees only the finished bytes. Any other name is refused and not imported. Before it runs, its
instructions are counted: a few of them can demand any amount of memory, or of the stack.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, Final

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

_MOST_INSTRUCTIONS: Final = 1 << 18
"""10,000 images take about 100,000 in the most talkative format."""
_MOST_TUPLES: Final = 1 << 15
"""Python looks into tuples in tuples without checking its stack; about 150,000 of them crash it."""
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_STORES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})

_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(MemoryError, OverflowError, RecursionError),
)
"""What reading a damaged file raises: a length in it may be any number, and lists may lie in lists without end."""


class _PickledArray:
    """Stands for an array, until the pickle has said what is in it."""

    __slots__ = ("array",)

    def __init__(self, *_: object) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _PickledType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it holds an array of something else than bytes")
        self.array = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


class _PickledType:
    """Stands for the type of an array, which can only be bytes without a sign."""

    __slots__ = ()

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError("it holds an array of something else than bytes")

    def __setstate__(self, state: object) -> None:
        """The order of bytes in a number, and the like: a byte has none."""


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._encoded_left = len(data)
        self._meant: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
            ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
            ("numpy", "ndarray"): None,  # an argument of the one above
            ("numpy", "dtype"): _PickledType,
            ("_codecs", "encode"): self._encode,  # how Python 3 writes bytes in the old format that these files use
        }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._meant[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images do not need") from None

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
        self._encoded_left -= len(text)
        if self._encoded_left < 0:
            raise pickle.UnpicklingError("it makes more bytes than it has")
        return text.encode("latin1")


def read_pickle(data: bytes) -> Any:
    """The plain value of a pickle, arrays only directly in a dictionary; one of ``_DAMAGED`` if it holds anything
    else."""
    _check_instructions(data)
    value = _PlainUnpickler(data).load()
    if isinstance(value, dict):
        value = {key: one.array if isinstance(one, _PickledArray) else one for key, one in value.items()}
    _refuse_objects(value, set())
    return value


def _check_instructions(data: bytes) -> None:
    """Walk through the instructions without carrying them out."""
    tuples = 0
    for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        tuples += instruction.name in _TUPLES
        place = argument if instruction.name in _STORES else 0
        assert isinstance(place, int)
        if max(count, place) > _MOST_INSTRUCTIONS or tuples > _MOST_TUPLES:
            raise pickle.UnpicklingError("it has more parts than any batch")


def _refuse_objects(value: Any, seen: set[int]) -> None:
    """``seen``: lists that were looked at; without it, a few lists that hold one another twice take forever."""
    if isinstance(value, (dict, list, tuple)):
        if id(value) in seen:
            return
        seen.add(id(value))
        for held in (*value, *value.values()) if isinstance(value, dict) else value:
            _refuse_objects(held, seen)
    elif not isinstance(value, (bytes, str, int, float, np.ndarray, type(None))):
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__.strip('_')}")


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
