"""The receiving half of an endpoint: copies every chunk from its frame to its place."""

from __future__ import annotations

from lockstep.transports.frame_error import FrameError
from lockstep.transports.landing import ArrivingTransfer, Landing
from lockstep.transports.stream.frames import Header


class ChunkLanding(Landing):
    """Puts the chunks of one peer in place."""

    def take(self, header: Header, payload: memoryview) -> tuple[bytes, ArrivingTransfer] | None:
        """Put one chunk in place; the whole transfer with its note if this was its last chunk."""
        if header.note_bytes > len(payload):
            raise FrameError("a chunk is shorter than its note")
        note, data = payload[: header.note_bytes], payload[header.note_bytes :]
        grant = self.begin(header, len(data))
        with self.lock:
            if not self.is_open:
                return None
            if not grant.land(header.offset, data):
                raise FrameError(f"region {header.region} is no longer granted")
        landed = self.end(header, len(data))
        return None if landed is None else (bytes(note), landed)
