"""Writes tensors to a safetensors file, with its digest: in pieces, so that no other thread of the task stalls.

The safetensors library reads these files back. Its own writer needs all tensors as one object and does not release the
interpreter lock while it works; that would slow down a training run beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.private_files import fresh_file

CHUNK_BYTES = 1 << 20
_ALIGNMENT = 64
_SYNC_BYTES = 16 << 20
"""Synced in pieces: one sync of a whole file on a slow disk could not be told from a disk that does not answer."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor as it is in memory; ``dtype`` as the format names it (``F32``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The name, length and digest that a file must have."""

    name: str
    nbytes: int
    digest: str


def write_tensors(
    path: Path,
    tensors: Sequence[NamedTensor],
    metadata: Mapping[str, str],
    on_written: Callable[[], None] | None = None,
) -> FileFacts:
    """Write and fsync a file; OSError if that fails, and then a part of it may exist. ``on_written`` is called after
    each piece."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return _write(path, [memoryview(struct.pack("<Q", len(text)) + text), *(t.data for t in tensors)], on_written)


def write_bytes(path: Path, data: bytes) -> FileFacts:
    """The same for bytes that are already a whole file."""
    return _write(path, [memoryview(data)])


def _write(path: Path, parts: Sequence[memoryview], on_written: Callable[[], None] | None = None) -> FileFacts:
    digest, nbytes, synced = hashlib.sha256(), 0, 0
    with fresh_file(path) as file:
        for part in parts:
            flat = part.cast("B")
            for first in range(0, len(flat), CHUNK_BYTES):
                chunk = flat[first : first + CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
                nbytes += len(chunk)
                if nbytes - synced >= _SYNC_BYTES:
                    synced = nbytes
                    file.flush()
                    os.fdatasync(file.fileno())
                if on_written is not None:
                    on_written()
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(path.name, nbytes, digest.hexdigest())


def digest_of(path: Path) -> tuple[int, str]:
    """The length and digest of a file as it is now."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return nbytes, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files themselves."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
