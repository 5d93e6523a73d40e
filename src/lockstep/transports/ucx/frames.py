"""What the two ends of a ``grpc+ucx`` link tell each other, as frames of the link's gRPC stream.

Before it writes, a sender asks once for each region (``ASK``; ``REGION`` tells its address and, one more than its
number, the GPU that it is on). Then, for each transfer: ``START`` lets the
receiver drive its side of the network, ``NOTE`` says that all bytes are in place, ``STOP`` that they will not be.
``PROBE`` tells where the peer may write some bytes, to see whether they arrive at all (``grpc+verbs``); ``IN_VAIN``
that they were looked for in vain, with the milliseconds in which this end could not look (``total``).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Kind(IntEnum):
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
"""What NIXL tells of itself or of a region is some hundred bytes; more than this is refused."""
