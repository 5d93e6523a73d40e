"""Gradients sent to a server, or to another rank, in 16 bits (``--wire_dtype``): half the bytes, less precision.

Only the transfer is narrow. A worker computes gradients in 32 bits and rounds each number once; whoever adds them up
widens them first. Initial parameters, and what comes back, are sent in full. A narrowed bucket is at the beginning of
the range that the full one would fill, so every offset of the plan stays the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.protocol.core.plan import Bucket
from lockstep.training.tensors import torch_dtype

_WIDE = "float32"


class WireFormat:
    """The format of a bucket of gradients in transit."""

    def __init__(self, name: str = _WIDE) -> None:
        """``name``: float32 (as they are), bfloat16 or float16."""
        self._dtype = torch_dtype(name)
        self.narrows = name != _WIDE

    def nbytes(self, bucket: Bucket) -> int:
        """The number of bytes that are sent."""
        return bucket.nbytes // 4 * self._dtype.itemsize if self._is_narrowed(bucket) else bucket.nbytes

    def narrowed(self, bucket: Bucket, whole: Tensor) -> Tensor:
        """The bytes to send, made from the bucket's own bytes, on the same device."""
        if not self._is_narrowed(bucket):
            return whole
        return whole.view(torch.float32).to(self._dtype).view(torch.uint8)

    def put(self, bucket: Bucket, arena: Tensor, leaving: Tensor, *, in_full: bool) -> int:
        """Copy a bucket from one arena to its place in another, from where it is sent; returns the number of bytes that
        are. ``in_full``: it holds other numbers than gradients, which are not rounded."""
        whole = arena[bucket.arena_offset : bucket.arena_offset + bucket.nbytes]
        sent = whole if in_full else self.narrowed(bucket, whole)
        leaving[bucket.arena_offset : bucket.arena_offset + sent.nbytes] = sent
        return sent.nbytes

    def dtype_of(self, bucket: Bucket, nbytes: int) -> torch.dtype:
        """The type of a bucket's gradients with this many bytes: full, or narrowed."""
        if nbytes == bucket.nbytes:
            return torch_dtype(bucket.dtype)
        if nbytes != self.nbytes(bucket):
            raise ValueError(f"{nbytes} bytes arrived for bucket {bucket.id}, which has {self.nbytes(bucket)}")
        return self._dtype

    def _is_narrowed(self, bucket: Bucket) -> bool:
        return self.narrows and bucket.dtype == _WIDE
