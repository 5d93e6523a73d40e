"""A loan as the borrower holds it, whatever memory it is in."""

from __future__ import annotations

from collections.abc import Callable


class HeldLoan:
    """Bytes that the peer lent; ``release`` notifies it, once."""

    def __init__(self, buffer: memoryview, release: Callable[[], None]) -> None:
        self._buffer = buffer
        self._release: Callable[[], None] | None = release

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
