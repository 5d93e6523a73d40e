"""What a library worker carries from step to step besides the parameters, as bytes: for its next incarnation, and for
checkpoints.

The models' buffers (batch-norm statistics), the numbers of the parameter groups, the objects passed to ``job.keep()``,
and the program's position in its loops. Random numbers and the position in the data follow from the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from lockstep.library.errors import UsageError
from lockstep.library.parameters import HasOptimizer, named_tensors
from lockstep.library.state_codec import Stateful, from_text, set_group, to_text
from lockstep.training.worker.binding import Trained
from lockstep.training.worker.local_state import DESCRIPTION, MOST_BYTES

PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class LoopPosition:
    """Where a program is: before iteration ``iteration``, after ``loops`` completed loops over ``job.steps()``.

    ``start``: the iteration with which the current loop began, or, if ``ended``, the loop that has just been completed.
    """

    iteration: int = 0
    loops: int = 0
    start: int = 0
    ended: bool = False


class TooLargeError(Exception):
    """The state is too large to be reported in every step; the text is a phrase."""


class ProgramState:
    """Captures the state of one worker's program, and restores it."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[HasOptimizer],
        trained: Sequence[Trained],
        *,
        describes: bool,
        most: int = MOST_BYTES,
    ) -> None:
        """``describes``: include the tensors' names, so that a checkpoint can be used without the program. ``most``:
        how many bytes may be reported in a step."""
        self._most = most
        self._optimizers = optimizers
        self._places = _places_of_buffers(models)
        self._metadata = {DESCRIPTION: json.dumps(_describe(models, trained))} if describes else {}
        self.kept: dict[str, Stateful] = {}
        self._found: Mapping[str, Any] = {}

    def take(self, place: LoopPosition) -> bytes:
        """The state before the iteration of ``place``; TooLargeError if it is more than a message should carry."""
        tensors: dict[str, Tensor] = {}
        program = {
            "place": asdict(place),
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for known in self._optimizers
                for group in known.optimizer.param_groups
            ],
            "kept": {name: one.state_dict() for name, one in self.kept.items()},
        }
        text = to_text(program, tensors).encode()
        tensors[PROGRAM] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for dtype, buffers in self._buffers().items():
            tensors[f"buffers/{dtype}"] = torch.cat([b.detach().reshape(-1) for b in buffers]).cpu()
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes > self._most:
            raise TooLargeError(
                f"its model has {nbytes >> 20} MiB of buffers; a worker can report {self._most >> 20} MiB per step"
            )
        return save(tensors, self._metadata)

    def put(self, packed: bytes) -> LoopPosition:
        """Restore the buffers now; ``put_program`` restores the rest once the program has created its objects.

        UsageError if it is another program's, or damaged; then nothing changes.
        """
        try:
            tensors = load(packed)
            found = from_text(tensors[PROGRAM].numpy().tobytes().decode(), tensors) if PROGRAM in tensors else {}
            place = LoopPosition(**found["place"]) if found else LoopPosition()
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"the state saved for this worker is damaged ({error!r}); give another train_dir"
            ) from error
        flat = {name.removeprefix("buffers/"): t for name, t in tensors.items() if name.startswith("buffers/")}
        wanted = self._buffers()
        sizes = {dtype: sum(b.numel() for b in buffers) for dtype, buffers in wanted.items()}
        if PROGRAM not in tensors or {dtype: t.numel() for dtype, t in flat.items()} != sizes:
            raise UsageError("the state saved for this worker belongs to a different program; give another train_dir")
        with torch.no_grad():
            for dtype, buffers in wanted.items():
                parts = flat[dtype].split([b.numel() for b in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape))
        self._found = found
        return place

    def put_program(self) -> None:
        """Restore the parameter groups and the kept objects; once, and only after ``put``."""
        if not self._found:
            return
        found, self._found = self._found, {}
        lacking = sorted(found["kept"].keys() ^ self.kept.keys())
        if lacking:
            raise UsageError(
                f"this job was resumed, but the objects passed to job.keep() have changed: {', '.join(lacking)}; keep "
                "the same objects under the same names, before the first loop over job.steps()"
            )
        for name, state in found["kept"].items():
            self.kept[name].load_state_dict(state)
        groups = [group for known in self._optimizers for group in known.optimizer.param_groups]
        if len(groups) != len(found["groups"]):
            raise UsageError("the state saved for this worker belongs to different optimizers; give another train_dir")
        for group, saved in zip(groups, found["groups"], strict=True):
            set_group(group, saved)

    def _buffers(self) -> dict[str, list[Tensor]]:
        """By dtype, in the models' order; looked up each time, because programs may replace buffers."""
        found: dict[str, list[Tensor]] = {}
        for owner, name in self._places:
            buffer = owner[name]
            assert buffer is not None
            found.setdefault(str(buffer.dtype).removeprefix("torch."), []).append(buffer)
        return found


def _places_of_buffers(models: Sequence[nn.Module]) -> list[tuple[dict[str, Tensor | None], str]]:
    """The owner and name of each buffer, in the order of ``named_tensors``; a shared buffer once per model."""
    places = []
    for model in models:
        seen: set[int] = set()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    places.append((module._buffers, name))
    return places


def _describe(models: Sequence[nn.Module], trained: Sequence[Trained]) -> dict[str, list[list[object]]]:
    """Names and shapes, as in ``training/worker/local_state.py``; buffers in the order in which they are packed."""
    saved = {
        f"{index}.{name}" if len(models) > 1 else name for index, m in enumerate(models) for name in m.state_dict()
    }
    return {
        "parameters": [[one.name, list(one.parameter.shape)] for one in trained],
        "buffers": [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), name in saved]
            for kind, name, tensor in named_tensors(models)
            if kind == "buffer"
        ],
    }
