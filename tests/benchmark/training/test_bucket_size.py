"""How large buckets are where nobody says it."""

from __future__ import annotations

import pytest
import torch

from lockstep.benchmark.training.bucket_size import fitting_bucket_bytes
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.training.worker.binding import Trained

MIB = 1 << 20
HERE = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")


def model_of(mebibytes: int) -> list[Trained]:
    """A parameter of this size that takes no memory."""
    return [Trained("w", torch.nn.Parameter(torch.empty(mebibytes * MIB // 4, device="meta")), 0)]


@pytest.mark.parametrize(
    ("mebibytes", "servers", "expected"),
    [
        (1, 1, 4),
        (17, 1, 17),
        (64, 1, 32),
        (100, 1, 32),
        (244, 1, 61),
        (600, 1, 64),
        (64, 2, 32),
        (256, 3, 32),
        (50, 3, 17),
    ],
)
def test_within_one_host_small_models_have_one_bucket_a_server_and_large_ones_four_or_more(
    mebibytes: int, servers: int, expected: int
) -> None:
    cluster = ClusterSpec(ps_hosts=HERE[:servers], worker_hosts=HERE[servers:])
    assert fitting_bucket_bytes(model_of(mebibytes), cluster) == expected * MIB


@pytest.mark.parametrize(
    ("servers", "workers", "protocol"),
    [
        (("10.0.0.1:1",), ("10.0.0.2:1",), "auto"),
        (("node-1:1",), ("node-1:2", "node-2:1"), "auto"),
        (("127.0.0.1:1",), ("127.0.0.1:2",), "grpc"),
        (("127.0.0.1:1",), ("127.0.0.1:2",), "grpc+verbs"),
    ],
)
def test_over_a_network_buckets_are_small(servers: tuple[str, ...], workers: tuple[str, ...], protocol: str) -> None:
    cluster = ClusterSpec(ps_hosts=servers, worker_hosts=workers, protocol=protocol)
    assert fitting_bucket_bytes(model_of(600), cluster) == 4 * MIB


@pytest.mark.parametrize("worker", ["localhost:2", "[::1]:2"])
def test_names_of_this_host_count_as_one(worker: str) -> None:
    cluster = ClusterSpec(ps_hosts=("127.0.0.1:1",), worker_hosts=(worker,))
    assert fitting_bucket_bytes(model_of(600), cluster) == 64 * MIB
