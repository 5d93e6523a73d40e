"""The size of a model's buckets if nobody chooses it. Torch-free, and equal on every task."""

from __future__ import annotations

from typing import Final

MEBIBYTE: Final = 1 << 20
BUCKET_BYTES: Final = 4 * MEBIBYTE
"""Over a network, unless the shard is large; and the least that is worth its messages within one host."""
LARGEST_FITTING_BUCKET: Final = 64 * MEBIBYTE
SMALL_SHARD: Final = 32 * MEBIBYTE
"""Per server; it is updated so fast that more than one bucket would only cost more messages."""
BUCKETS_OF_A_SERVER: Final = 4
"""Of a large model, where each is updated as soon as backward has filled it: updates should overlap with backward."""
SEALED_BUCKETS_OF_A_SERVER: Final = 8
"""Where all are updated after backward: while one is updated, the one before is on its way back, so that the last of
them is all that a worker waits for besides the updates."""

LARGEST_NETWORK_BUCKET: Final = 8 * MEBIBYTE
"""Over a network: the messages about a bucket take as much processor time as the bytes of 1 MiB or 2."""
NETWORK_BUCKETS_OF_A_SERVER: Final = 16
"""Of a large model: what a step waits for at its end is then a small part of what crosses the network."""

TORCH_BUCKET_BYTES: Final = 25 * MEBIBYTE
"""Where torch.distributed carries the buckets: the size that DDP takes, for which its backends are tuned."""


def rank_bucket_bytes(model_bytes: int, ranks: int, *, shares_memory: bool, carried_by_torch: bool) -> int:
    """The same where every rank trains: means are made while backward goes on, and the last bucket ends it."""
    if carried_by_torch:
        return TORCH_BUCKET_BYTES
    share = model_bytes // max(1, ranks)
    if not shares_memory:
        # Every rank has something to average, if there is enough of it.
        return _in_mebibytes(share, LARGEST_NETWORK_BUCKET)
    return _in_mebibytes(share // BUCKETS_OF_A_SERVER, LARGEST_FITTING_BUCKET)


def fitting_bucket_bytes(model_bytes: int, servers: int, *, shares_memory: bool, eager: bool) -> int:
    """The bucket size that follows from what all tasks share: the model and the cluster.

    Over a network, a step ends with the last bucket's round trip, which should be short beside all others. Within one
    host (``shares_memory``) nothing moves and the cost is the messages about each bucket, so there should be few, but
    enough for updates to overlap with something. ``eager``: buckets are updated while backward goes on.
    """
    shard_bytes = model_bytes // max(1, servers)
    if not shares_memory:
        return _in_mebibytes(shard_bytes // NETWORK_BUCKETS_OF_A_SERVER, LARGEST_NETWORK_BUCKET)
    if eager:
        fitting = max(shard_bytes // BUCKETS_OF_A_SERVER, min(shard_bytes, SMALL_SHARD))
    else:
        fitting = shard_bytes // SEALED_BUCKETS_OF_A_SERVER
    return _in_mebibytes(fitting, LARGEST_FITTING_BUCKET)


def _in_mebibytes(fitting: int, most: int) -> int:
    return min(max(-(-fitting // MEBIBYTE) * MEBIBYTE, BUCKET_BYTES), most)
