"""The receiving half of an endpoint: lets the kernel put the bytes of a chunk into their region."""

from __future__ import annotations

from typing import Final

from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import RegionGrant
from lockstep.transports.landing import Landing
from lockstep.transports.memory import address_of
from lockstep.transports.tcp.line import Line

Piece = tuple[int, int]
"""An address, and how many bytes."""
NOWHERE: Final[Piece] = (0, 0)
_WASTE_BYTES: Final = 256 << 10


class LineLanding(Landing):
    """Puts the chunks of one peer in place."""

    _waste: memoryview | None = None
    """Where what is thrown away is received."""

    def receive(
        self, grant: RegionGrant, line: Line, note: Piece, offset: int, nbytes: int, beyond: Piece = NOWHERE
    ) -> int:
        """Let the bytes that have come land at ``offset`` of the region, after the rest of the note, and what comes
        after them ``beyond``; how many came. ``EOFError`` also if this end has been closed."""
        with self.lock, grant.lock:
            if not self.is_open:
                raise EOFError
            if not grant.live or grant.region.closed:
                raise FrameError(f"region {grant.region.number} is no longer granted")
            if self.lands():
                return line.scatter(note, grant.region.address + offset, nbytes, beyond)
            return self._throw_away(line, note, nbytes, beyond)

    def _throw_away(self, line: Line, note: Piece, nbytes: int, beyond: Piece) -> int:
        if self._waste is None:
            self._waste = memoryview(bytearray(_WASTE_BYTES))
        some = min(nbytes, _WASTE_BYTES)
        return line.scatter(note, address_of(self._waste), some, beyond if some == nbytes else NOWHERE)
