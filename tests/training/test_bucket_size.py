"""How large buckets are where nobody says it."""

from __future__ import annotations

import pytest

from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.training.bucket_size import fitting_bucket_bytes, rank_bucket_bytes

MIB = 1 << 20
HERE = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")


def fitting(mebibytes: int, cluster: ClusterSpec, *, eager: bool = True) -> float:
    nbytes = fitting_bucket_bytes(
        mebibytes * MIB, cluster.shape.servers, shares_memory=cluster.shares_memory, eager=eager
    )
    return nbytes / MIB


@pytest.mark.parametrize(
    ("mebibytes", "servers", "eager", "sealed"),
    [
        (1, 1, 4, 4),
        (17, 1, 17, 4),
        (64, 1, 32, 8),
        (100, 1, 32, 13),
        (244, 1, 61, 31),
        (475, 1, 64, 60),
        (600, 1, 64, 64),
        (64, 2, 32, 4),
        (256, 3, 32, 11),
        (50, 3, 17, 4),
    ],
)
def test_within_one_host_buckets_grow_with_the_model(mebibytes: int, servers: int, eager: int, sealed: int) -> None:
    cluster = ClusterSpec(ps_hosts=HERE[:servers], worker_hosts=HERE[servers:])
    assert fitting(mebibytes, cluster) == eager
    assert fitting(mebibytes, cluster, eager=False) == sealed


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("servers", "workers", "protocol"),
    [
        (("10.0.0.1:1",), ("10.0.0.2:1",), "auto"),
        (("node-1:1",), ("node-1:2", "node-2:1"), "auto"),
        (("127.0.0.1:1",), ("127.0.0.1:2",), "grpc"),
        (("127.0.0.1:1",), ("127.0.0.1:2",), "grpc+verbs"),
    ],
)
def test_over_a_network_buckets_are_small(
    servers: tuple[str, ...], workers: tuple[str, ...], protocol: str, eager: bool
) -> None:
    cluster = ClusterSpec(ps_hosts=servers, worker_hosts=workers, protocol=protocol)
    assert fitting(18, cluster, eager=eager) == 4
    assert fitting(600, cluster, eager=eager) == 8


@pytest.mark.parametrize(("mebibytes", "servers", "size"), [(64, 1, 4), (98, 1, 7), (98, 2, 4), (244, 1, 8)])
def test_over_a_network_each_is_at_most_a_sixteenth_of_a_large_shard(mebibytes: int, servers: int, size: int) -> None:
    nbytes = fitting_bucket_bytes(mebibytes * MIB, servers, shares_memory=False, eager=True)
    assert nbytes == size * MIB


@pytest.mark.parametrize("worker", ["localhost:2", "[::1]:2"])
def test_names_of_this_host_count_as_one(worker: str) -> None:
    cluster = ClusterSpec(ps_hosts=("127.0.0.1:1",), worker_hosts=(worker,))
    assert fitting(600, cluster) == 64


@pytest.mark.parametrize(
    ("mebibytes", "ranks", "size"), [(1, 2, 4), (12, 2, 6), (17, 2, 8), (17, 8, 4), (244, 2, 8), (244, 100, 4)]
)
def test_over_a_network_ranks_have_larger_ones_while_there_is_one_for_each(
    mebibytes: int, ranks: int, size: int
) -> None:
    assert rank_bucket_bytes(mebibytes * MIB, ranks, shares_memory=False, carried_by_torch=False) == size * MIB
