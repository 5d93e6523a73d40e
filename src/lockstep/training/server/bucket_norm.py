"""The norm of the mean of the workers' gradients of one bucket.

A bucket is read in spans that stay in a cache, each reduced and measured at once; several threads take spans. The cuts
depend on the bucket alone, and the parts are added up exactly, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.norms import combined
from lockstep.runtime.task.store import Found
from lockstep.training.server.piece_pool import PiecePool
from lockstep.training.server.sgd import mean_of
from lockstep.training.torch_private import foreach_norm

_SPAN_BYTES = 4 << 20
"""A norm is one pass: it needs less of a cache than an update, and fewer calls leave more of the interpreter to the
threads."""


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Neighbouring elements of a bucket, and which of them are parameters: what lies between is not measured."""

    where: slice
    parts: tuple[slice, ...]
    """Relative to ``where``."""


def spans_of(ranges: Sequence[slice], element_size: int) -> list[BucketSpan]:
    """Spans that cover these ranges of elements, in order."""
    most = _SPAN_BYTES // element_size
    cuts = [slice(first, min(first + most, one.stop)) for one in ranges for first in range(one.start, one.stop, most)]
    spans: list[list[slice]] = []
    for cut in cuts:
        if spans and cut.stop - spans[-1][0].start <= most:
            spans[-1].append(cut)
        else:
            spans.append([cut])
    return [_span(parts) for parts in spans]


def _span(parts: Sequence[slice]) -> BucketSpan:
    first = parts[0].start
    return BucketSpan(slice(first, parts[-1].stop), tuple(slice(one.start - first, one.stop - first) for one in parts))


def norms_of(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of each, in 32 bits at least."""
    small = tensors[0].element_size() == 2
    return torch.stack(foreach_norm(list(tensors), norm_type, dtype=torch.float32 if small else None))


def begin_norm(
    given: Sequence[Tensor],
    replicas: int,
    spans: Sequence[BucketSpan],
    dtype: torch.dtype,
    norm_type: float,
    crew: PiecePool,
    found: Found,
) -> None:
    """Find the norm of the mean. ``dtype``: in which it is made. Threads that are through with one bucket go on with
    the next: nobody waits for the last of them."""
    norms = [0.0] * len(spans)

    def measure(number: int, thread: int) -> None:
        span = spans[number]
        room = crew.room(thread, span.where.stop - span.where.start, dtype)
        mean = mean_of([one[span.where] for one in given], replicas, room)
        norms[number] = combined(norms_of([mean[part] for part in span.parts], norm_type).tolist(), norm_type)

    crew.begin(len(spans), measure, lambda error: found(combined(norms, norm_type), error))
