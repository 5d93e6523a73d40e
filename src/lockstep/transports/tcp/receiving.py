"""The receiving half of an endpoint: lets the kernel put the bytes of a chunk into their region."""

from __future__ import annotations

from typing import Final

from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import RegionGrant
from lockstep.transports.landing import Landing
from lockstep.transports.tcp.line import Line

Piece = tuple[int, int]
"""An address, and how many bytes."""
NOWHERE: Final[Piece] = (0, 0)


class LineLanding(Landing):
    """Puts the chunks of one peer in place."""

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
            return line.scatter(note, (grant.region.address + offset, nbytes), beyond)
