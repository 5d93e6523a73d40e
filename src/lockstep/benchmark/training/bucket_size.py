"""The bucket size of a benchmark if no flag sets it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.benchmark.settings.config import (
    BUCKET_BYTES,
    BUCKETS_OF_A_SERVER,
    LARGEST_FITTING_BUCKET,
    MEBIBYTE,
    SMALL_SHARD,
)
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.training.worker.binding import Trained


def fitting_bucket_bytes(trained: Sequence[Trained], cluster: ClusterSpec) -> int:
    """The bucket size, equal on every task, since it follows from settings that all of them share.

    Over a network, a step ends with the last bucket's round trip, which should be short. Within one host nothing
    moves and the cost is the messages about each bucket, so there should be few, but enough for updates to overlap
    with the backward pass.
    """
    if not cluster.shares_memory:
        return BUCKET_BYTES
    model_bytes = sum(one.parameter.nbytes for one in trained)
    shard_bytes = model_bytes // max(1, cluster.shape.servers)
    fitting = max(shard_bytes // BUCKETS_OF_A_SERVER, min(shard_bytes, SMALL_SHARD))
    return min(max(-(-fitting // MEBIBYTE) * MEBIBYTE, BUCKET_BYTES), LARGEST_FITTING_BUCKET)
