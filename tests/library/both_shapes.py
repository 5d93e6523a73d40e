"""The same program in both shapes of a job: with servers, and where every rank trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.cluster import in_process_cluster
from library.same_loop import run_jobs
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import ClusterShape
from lockstep.training.server.mean_store import MeanStore
from lockstep.training.server.shard_store import TorchShardStore

SERVED, RANKS = ClusterShape(2, 2), ClusterShape(0, 2)
both_shapes = pytest.mark.parametrize("shape", [SERVED, RANKS], ids=["servers", "ranks"])


def run_in(shape: ClusterShape, body: Callable[[Job], None], **options: Any) -> list[str]:
    """Run ``body`` as every worker's program; returns what the job said, raises what the first of them raised."""
    store: Callable[[], Any] = TorchShardStore if shape.servers else MeanStore
    with in_process_cluster(shape, store, eager=not shape.servers, **options) as cluster:
        run_jobs(cluster, body, JobOptions(bucket_bytes=2048))
        return cluster.said
