"""How a server's shard is named in a checkpoint file, and how any plan finds its pieces there.

A tensor in a file is a piece of one parameter (``value``) or of its optimizer's state, named
``KIND|FIRST|NAME|PARAMETER``: the parameter, the element that the piece begins with, and for a state its own name.
A different number of servers splits the parameters elsewhere, so a piece is assembled from all that overlap it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.training.server.optimizer_state import PieceState

VALUE, STATE = "value", "state"
_FORMAT_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class PieceName:
    """Identifies a tensor of a checkpoint."""

    kind: str
    first: int
    name: str
    parameter: str

    def __str__(self) -> str:
        return f"{self.kind}|{self.first}|{self.name}|{self.parameter}"

    @classmethod
    def parse(cls, text: str) -> PieceName:
        kind, first, name, parameter = text.split("|", 3)
        return cls(kind, int(first), name, parameter)


def named(name: PieceName, tensor: Tensor) -> NamedTensor:
    """A tensor in host memory that nothing changes any more, as it is written to a file."""
    flat = tensor.detach().contiguous()
    data = flat.reshape(-1).view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    dtype = _FORMAT_DTYPES[str(flat.dtype).removeprefix("torch.")]
    return NamedTensor(str(name), dtype, tuple(flat.shape), data.numpy().data)


class ShardFiles:
    """The shard files of one checkpoint, open for reading by name."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """ValueError if a file is not a shard."""
        self._files = []
        self._found: dict[tuple[str, str], list[tuple[int, str, str, int]]] = {}
        for number, name in enumerate(names):
            try:
                opened = safe_open(folder / name, framework="pt")
                self._files.append(opened)
                self._learn(number, opened.keys())  # type: ignore[no-untyped-call]  # the library has no types
            except (SafetensorError, OSError, ValueError) as error:
                raise ValueError(f"{folder / name} cannot be read as a shard: {error}") from error

    def _learn(self, number: int, keys: Iterable[str]) -> None:
        for key in keys:
            piece = PieceName.parse(key)
            row = (piece.first, piece.name, key, number)
            self._found.setdefault((piece.kind, piece.parameter), []).append(row)

    def _tensor(self, key: str, number: int) -> Tensor:
        tensor: Tensor = self._files[number].get_tensor(key)  # type: ignore[no-untyped-call]
        return tensor

    def value(self, parameter: str, first: int, elements: int, dtype: torch.dtype) -> Tensor:
        """The elements from ``first`` on; ValueError if some of them are missing."""
        whole = torch.empty(elements, dtype=dtype)
        filled = self._fill(whole, VALUE, parameter, "", first)
        if filled != elements:
            raise ValueError(
                f"the checkpoint has only {filled} of the {elements} elements of {parameter!r} from {first} on"
            )
        return whole

    def _fill(self, whole: Tensor, kind: str, parameter: str, name: str, first: int) -> int:
        filled, end = 0, first + whole.numel()
        for begin, known, key, number in sorted(self._found.get((kind, parameter), ())):
            if known != name:
                continue
            tensor = self._tensor(key, number).reshape(-1)
            low, high = max(first, begin), min(end, begin + tensor.numel())
            if low < high:
                whole[low - first : high - first] = tensor[low - begin : high - begin]
                filled += high - low
        return filled

    def state(self, parameter: str, first: int, elements: int) -> PieceState:
        """The optimizer's state of these elements; empty if it has none yet."""
        state: PieceState = {}
        rows = self._found.get((STATE, parameter), ())
        for name in sorted({row[1] for row in rows}):
            covering = [row for row in rows if row[1] == name]
            sample = self._tensor(covering[0][2], covering[0][3])
            if not sample.dim():
                state[name] = sample.clone()  # a count of steps, the same for all pieces of a parameter
                continue
            whole = torch.empty(elements, dtype=sample.dtype)
            if self._fill(whole, STATE, parameter, name, first) == elements:
                state[name] = whole
        return state
