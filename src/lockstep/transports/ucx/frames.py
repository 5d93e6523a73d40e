"""What the two ends of a ``grpc+ucx`` link send each other, as frames of the link's gRPC stream.

Before it writes, a sender asks once per region (``ASK``; ``REGION`` answers with its address and the number of its GPU
plus one, or 0). Then, for each transfer: ``START`` makes the receiver drive its side of the network, ``NOTE`` means
that all bytes are in place, ``STOP`` that they will not be. ``PROBE`` names where the peer may write a few bytes, to
see whether they arrive at all (``grpc+verbs``); ``IN_VAIN`` means that they did not, with the milliseconds in which
this end could not look (``total``).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class UcxFrameKind(IntEnum):
    """Kinds of this transport; the lower numbers are those of every stream."""

    AGENT = 16
    ASK = 17
    REGION = 18
    START = 19
    NOTE = 20
    STOP = 21
    PROBE = 22
    IN_VAIN = 23


MAX_METADATA_BYTES: Final = 64 << 10
"""NIXL's metadata of an agent or a region takes a few hundred bytes; more than this is refused."""
