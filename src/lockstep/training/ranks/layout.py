"""Where the gradients of a model lie while they are averaged: the plan of a job in which every rank trains.

Besides the parameters a plan has two entries that are no parameters. ``PRESENCE`` has one number per parameter: 1 where
this rank has a gradient of it. Averaged like a gradient, it is above 0 where any rank has one. ``BUFFERS`` has the
chief's buffers, which nobody averages, and digests of its parameters, with which every rank compares its own. Plans are
packed from the last entry to the first, so both travel last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import BUFFERS, PRESENCE, Plan, make_plan
from lockstep.training.tensors import dtype_name, parameter_offsets
from lockstep.training.worker.binding import Trained

LOOPS = 6
"""Of so many loops of its own the chief tells where it is."""
_PLACES = 256
_AVERAGED, _COPIED = 0, 1
"""Groups of entries; a bucket has entries of one group only."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The plan, and what its entries are."""

    plan: Plan
    trained: tuple[Trained, ...]
    """The parameters, in the order of their entries."""
    first: int
    """How many entries come before them."""
    presence: int | None = None
    """The entry of that name, if there is one."""
    buffers: tuple[Tensor, ...] = ()
    """What the entry of that name has, in its order: those of the model, and ``sheet``."""
    sheet: Tensor | None = None
    """Where the chief is in ``job.steps()``, two numbers for each of its own loops, the step of which its digests are,
    and one for each parameter; the rest is unused."""

    @property
    def copied(self) -> frozenset[BucketId]:
        """Buckets that everyone takes from the chief."""
        return frozenset(b.id for b in self.plan.buckets if self.buffers and b.group == _COPIED)

    def offset_of(self, entry: int) -> int:
        return parameter_offsets(self.plan)[entry]


def lay_out(trained: Sequence[Trained], buffers: Sequence[Tensor], homes: int, bucket_bytes: int) -> RankLayout:
    """The layout of a model; ``homes``: over how many tasks its buckets are dealt out."""
    # Rounded up: a model with one parameter more then differs in that one first, and is refused by its name.
    places = -(-(len(trained) + 2 + 2 * LOOPS) // _PLACES) * _PLACES
    # Where the gradients are: between host and GPU, each step would wait for the GPU.
    device = trained[0].parameter.device if trained else torch.device("cpu")
    sheet = torch.full((places,), -1, dtype=torch.int64, device=device)
    copied = (*buffers, sheet)
    # Of the kind that the first parameters are, so that it fits into their bucket.
    kind = dtype_name(trained[0].parameter.dtype) if trained else "float32"
    entries = [
        ParameterEntry(BUFFERS, sum(_words(b) for b in copied), "float32", _COPIED),
        ParameterEntry(PRESENCE, places, kind, _AVERAGED),
        *(_entry_of(one) for one in trained),
    ]
    plan = make_plan(entries, homes, bucket_bytes)
    return RankLayout(plan, tuple(trained), len(entries) - len(trained), 1, copied, sheet)


def _entry_of(one: Trained) -> ParameterEntry:
    parameter = one.parameter
    return ParameterEntry(one.name, parameter.numel(), dtype_name(parameter.dtype), _AVERAGED)


def _words(buffer: Tensor) -> int:
    """Of 8 bytes each buffer has a whole number, so that each begins where its type may."""
    return -(-buffer.nbytes // 8) * 2


def buffer_views(arena: Tensor, offset: int, buffers: Sequence[Tensor]) -> list[Tensor]:
    """The places of these buffers in a byte arena, in their shapes."""
    views = []
    for buffer in buffers:
        flat = arena[offset : offset + buffer.nbytes]
        # torch cannot view bytes as booleans, but booleans are bytes.
        kind = torch.uint8 if buffer.dtype == torch.bool else buffer.dtype
        views.append(flat.view(kind).view(buffer.shape))
        offset += 4 * _words(buffer)
    return views


def gradient_view(arena: Tensor, offset: int, like: Tensor) -> Tensor:
    """The place of one gradient in a byte arena, in the memory format of its parameter where that has no gaps.

    Fused optimizers need both in the same format. All ranks must have the same: ``formats`` is compared at the start.
    """
    flat = arena[offset : offset + like.numel() * like.element_size()].view(like.dtype)
    return flat.as_strided(like.shape, like.stride()) if is_dense(like) else flat.view(like.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether it covers a range of memory without gaps and without covering anything twice."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def formats(trained: Sequence[Trained]) -> str:
    """The order in which each parameter's numbers lie in memory, as text; only those of an unusual one."""
    unusual = [one for one in trained if not one.parameter.is_contiguous() and is_dense(one.parameter)]
    return ";".join(f"{one.name} {tuple(one.parameter.stride())}" for one in unusual)
