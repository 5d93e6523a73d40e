"""How large the buckets of a benchmark are where its flags do not say it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.runtime.cluster import ClusterSpec
from lockstep.training.binding import Trained
from lockstep.training.config import (
    BUCKET_BYTES,
    BUCKETS_OF_A_SERVER,
    LARGEST_FITTING_BUCKET,
    MEBIBYTE,
    SMALL_SHARD,
)


def fitting_bucket_bytes(trained: Sequence[Trained], cluster: ClusterSpec) -> int:
    """The same on every task, since it follows from what all of them were told.

    Over a network the last bucket's way there and back is the end of a step: it should be short. Within one host
    nothing moves; what costs is to tell of a bucket, so there should be few, and enough of them to be updated beside
    the backward.
    """
    if not cluster.shares_memory:
        return BUCKET_BYTES
    model_bytes = sum(one.parameter.nbytes for one in trained)
    shard_bytes = model_bytes // max(1, cluster.shape.servers)
    fitting = max(shard_bytes // BUCKETS_OF_A_SERVER, min(shard_bytes, SMALL_SHARD))
    return min(max(-(-fitting // MEBIBYTE) * MEBIBYTE, BUCKET_BYTES), LARGEST_FITTING_BUCKET)
