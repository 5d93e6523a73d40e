"""How ``grpc`` moves a transfer: in chunks, which are a separate kind of frame in its stream.

A chunk's payload is the transfer's note (with the last chunk only) and then its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lockstep.transports.base import Move, TransferId
from lockstep.transports.landing import FIRST, LAST, LOAN
from lockstep.transports.stream.frames import Header, pack

CHUNK: Final = 2
"""Kind of these frames."""
CHUNK_BYTES: Final = 1 << 20


@dataclass(slots=True, eq=False)
class ChunkedTransfer:
    """One write or loan that has not been settled yet."""

    number: TransferId
    move: Move
    data: memoryview
    begun: int = 0
    """How many bytes have become chunks."""

    @property
    def left(self) -> bool:
        """Whether all bytes have become chunks."""
        return self.begun == self.data.nbytes

    def claim(self) -> tuple[int, int]:
        """The next range to send."""
        begin = self.begun
        self.begun = min(begin + CHUNK_BYTES, self.data.nbytes)
        return begin, self.begun

    def pack(self, begin: int, end: int) -> bytes:
        """A claimed range as a frame: here the bytes are copied."""
        move, total = self.move, self.data.nbytes
        note = move.note if end == total else b""
        header = Header(
            kind=CHUNK,
            flags=(FIRST if begin == 0 else 0) | (LAST if end == total else 0) | (LOAN if move.loan else 0),
            note_bytes=len(note),
            transfer=self.number,
            region=move.target.region,
            key=move.target.key,
            offset=move.target_offset + begin,
            total=total,
        )
        return pack(header, note, self.data[begin:end])
