"""Where the mean of a bucket stays, for its second home: written piece by piece, in the pass that makes the version.

A piece is read back while it is in a core's cache. A pass of its own over the whole bucket would find none of it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from torch import Tensor

Whole = Callable[[], None]
"""Called once, on the thread that wrote the last piece, as soon as the whole mean is there."""


class MeanRoom:
    """Room for one mean."""

    def __init__(self, whole: Tensor, on_whole: Whole) -> None:
        self.whole = whole
        self._on_whole = on_whole
        self._pieces = 0
        self._written = count(1)  # each number is handed out only once

    def in_pieces(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """These pieces of it will be written; what lies between them has no mean."""
        self._pieces = len(pieces)
        if not pieces:
            self._on_whole()
        return pieces

    def piece_is_written(self) -> None:
        """Called for each of them, on any thread. Nobody writes to it again."""
        if next(self._written) == self._pieces:
            self._on_whole()
