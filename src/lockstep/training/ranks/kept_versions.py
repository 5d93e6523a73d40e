"""What a rank keeps for another one that is lost and comes back: parameters, optimizers, means.

Three things can be asked for, each of one version, in pieces:

- ``NOW``: parameters and optimizers, while nobody changes them: from the beginning of an iteration to the word of its
  step, which cannot come while a rank is missing; or, when every optimizer has made its step, while the program waits
  in a call of the job.
- ``BEFORE``: the parameters that the newest committed step was computed with, kept when its word came.
- ``MEANS``: the means of that step, as they came, whatever the program has made of ``grad`` since.

The training thread says when it begins and ends to change things; the store's thread answers. Both hold the lock for
one piece at most.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.foreign import read_json
from lockstep.protocol.core.ids import INITIAL_STEP
from lockstep.training.torch_private import foreach_copy_

NOW: Final = "parameters and optimizers"
BEFORE: Final = "parameters before the step"
MEANS: Final = "means"
PIECE_BYTES: Final = 4 << 20
SIZES: Final = -1
"""The offset at which the sizes are asked for."""
HEADER_BYTES: Final = 64 << 20
HEADER_VALUES: Final = 1 << 20
"""Of what is said about the tensors that follow."""
_MOST_SIZE: Final = 1 << 48
_MOST_DIMENSIONS: Final = 32
SAVE_SECONDS: Final = 60.0
NONE: Final = INITIAL_STEP - 1

Described = Callable[[], tuple[str, dict[str, Tensor]]]
"""The state of the optimizers, as a text and the tensors that it names."""


class _Stream:
    """Tensors one after another, behind a header that says what they are; read from any offset."""

    def __init__(self, text: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        entries = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors]
        self.header = json.dumps({"text": text, "tensors": entries}).encode()
        self._parts = [memoryview(self.header), *(_as_bytes(tensor) for _, tensor in tensors)]
        self.total = sum(part.nbytes for part in self._parts)

    def read(self, offset: int) -> bytes:
        found, wanted = bytearray(), PIECE_BYTES
        for part in self._parts:
            if offset < part.nbytes and wanted:
                piece = part[offset : offset + wanted]
                found += piece
                wanted -= piece.nbytes
            offset = max(0, offset - part.nbytes)
        return bytes(found)


def _as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def question(version: int, offset: int) -> bytes:
    return json.dumps([version, offset]).encode()


def read_question(data: bytes) -> tuple[int, int]:
    """Version and offset; ValueError for anything else."""
    match read_json(data):
        case [int() as version, int() as offset] if offset >= SIZES:
            return version, offset
    raise ValueError("no version and offset were asked for")


def read_sizes(data: bytes) -> tuple[int, int]:
    """Of the header and of the whole stream; ValueError for anything else."""
    match read_json(data):
        case [int() as header, int() as total] if 0 <= header <= total:
            return header, total
    raise ValueError("the answer has no sizes")


def read_stream(data: bytearray, header: int) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors of a stream; ValueError for anything else."""
    match read_json(bytes(data[:header]), HEADER_BYTES, values=HEADER_VALUES):
        case {"text": str() as text, "tensors": list() as told}:
            pass
        case _:
            raise ValueError("the answer does not say what it has")
    tensors, at = {}, header
    for entry in told:
        name, dtype, shape = _entry(entry)
        nbytes = math.prod(shape) * dtype.itemsize
        if at + nbytes > len(data):
            raise ValueError(f"the answer has too few bytes for {name!r}")
        flat = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at).clone() if nbytes else None
        tensors[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.view(dtype).reshape(shape)
        at += nbytes
    return text, tensors


def _entry(told: object) -> tuple[str, torch.dtype, list[int]]:
    match told:
        case [str() as name, str() as kind, list() as shape]:
            dtype = getattr(torch, kind, None)
            sizes = [size for size in shape if isinstance(size, int) and 0 <= size < _MOST_SIZE]
            if isinstance(dtype, torch.dtype) and len(sizes) == len(shape) <= _MOST_DIMENSIONS:
                return name, dtype, sizes
    raise ValueError("the answer describes something that is no tensor")


class KeptVersions:
    """One rank's."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: int, describe: Described, landed: Callable[[int], Tensor]
    ) -> None:
        """``optimizers``: how many there are. ``landed``: the means of a version, as bytes."""
        self._parameters = parameters
        self._optimizers = optimizers
        self._describe = describe
        self._landed = landed
        self._changed = threading.Condition()
        self._now = NONE
        """The version that parameters and optimizers have; ``NONE``: they are being changed."""
        self._before = NONE
        self._copies = [torch.empty_like(p) for p in parameters]
        self._means = NONE
        self._stepped: set[int] = set()
        self._is_still = False
        self._saving = NONE
        self._stream: tuple[tuple[str, int], _Stream] | None = None

    # -- the training thread --

    def open(self, version: int) -> None:
        """An iteration begins with this version: nobody changes it before the word of its step."""
        with self._changed:
            self._now, self._stream = version, None

    def close(self, step: int) -> None:
        """The word of ``step`` has come: parameters will be changed from now on, and are kept as they were."""
        with self._changed:
            self._changed.wait_for(lambda: self._saving != self._now or self._now == NONE, SAVE_SECONDS)
            self._now, self._stream = NONE, None
            self._stepped.clear()
            with torch.no_grad():
                foreach_copy_(self._copies, [p.detach() for p in self._parameters])
            self._before, self._means = step, step + 1

    def take_before(self, version: int, values: Sequence[Tensor]) -> None:
        """This rank has come back to the step after ``version``, whose parameters these were."""
        with self._changed, torch.no_grad():
            foreach_copy_(self._copies, [v.reshape(c.shape) for v, c in zip(values, self._copies, strict=True)])
            self._before, self._stream = version, None

    def has_means(self, version: int) -> None:
        """The means of this version are where they arrive."""
        with self._changed:
            self._means, self._stream = version, None

    def stepped(self, optimizer: int) -> None:
        with self._changed:
            self._stepped.add(optimizer)

    @contextmanager
    def still(self) -> Iterator[None]:
        """The program waits in a call, and changes nothing meanwhile."""
        with self._changed:
            self._is_still = True
        try:
            yield
        finally:
            with self._changed:
                self._is_still, self._stream = False, None

    # -- the loop's thread, and the store's --

    def expect_save(self, version: int) -> None:
        """A checkpoint of this version is to be made: it stays until ``save`` has copied it."""
        with self._changed:
            if self._now == version:
                self._saving = version

    def save(self, version: int, take: Callable[[], Any]) -> Any:
        """What ``take`` returns; ValueError if the version is gone."""
        with self._changed:
            try:
                if self._now != version:
                    raise ValueError(f"this rank is past version {version}")
                return take()
            finally:
                self._saving = NONE
                self._changed.notify_all()

    def answer(self, what: str, data: bytes) -> bytes:
        """A piece of what is asked for; empty: not now. ValueError if it cannot be told at all."""
        version, offset = read_question(data)
        with self._changed:
            if not self._has(what, version):
                return b""
            if self._stream is None or self._stream[0] != (what, version):
                self._stream = ((what, version), self._make(what, version))
            stream = self._stream[1]
            if offset == SIZES:
                return json.dumps([len(stream.header), stream.total]).encode()
            return stream.read(offset)

    def _has(self, what: str, version: int) -> bool:
        if what == NOW:
            stepped = self._now == NONE and self._before == version - 1 and len(self._stepped) == self._optimizers
            return self._now == version or (self._is_still and stepped)
        return version == (self._before if what == BEFORE else self._means if what == MEANS else NONE - 1)

    def _make(self, what: str, version: int) -> _Stream:
        if what == MEANS:
            return _Stream("", [("means", self._landed(version))])
        if what == BEFORE:
            return _Stream("", [(str(number), copy) for number, copy in enumerate(self._copies)])
        text, tensors = self._describe()
        values = [(str(number), p.detach()) for number, p in enumerate(self._parameters)]
        return _Stream(text, [*values, *tensors.items()])
