"""Ranks in one process: each lends its gradients, and gets the same mean as every other, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers.cluster import in_process_cluster
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import CHIEF, ClusterShape, worker
from lockstep.protocol.core.messages import Layout, ParameterEntry
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.rank_node import RankNode
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.mean_store import CHIEFS, MEAN, MeanStore
from lockstep.training.tensors import as_tensor, torch_dtype
from lockstep.training.wire_format import WireFormat

STEPS = 4
BUCKET_BYTES = 512
ENTRIES = (
    ParameterEntry("first", 300, "float32", 0),
    ParameterEntry("second", 7, "float64", 0),
    ParameterEntry("third", 130, "bfloat16", 0),
)


def given(rank: int, step: int, plan: Plan) -> list[Tensor]:
    """The gradients of one rank, bucket by bucket; step -1: what the chief begins with."""
    made = torch.Generator().manual_seed(1000 * rank + step + 1)
    sizes = [(bucket.nbytes // torch_dtype(bucket.dtype).itemsize, bucket.dtype) for bucket in plan.buckets]
    return [torch.randn(n, generator=made, dtype=torch.float64).to(torch_dtype(dtype)) for n, dtype in sizes]


def mean(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total / len(gradients) if len(gradients) > 1 else total


def fill(node: RankNode, bucket: int, values: Tensor) -> None:
    assert node.plan is not None
    assert node.gradients is not None
    whole = node.plan.buckets[bucket]
    place = node.gradients.buffer[whole.arena_offset : whole.arena_offset + values.nbytes]
    as_tensor(place, values.dtype).copy_(values)


def means_of(node: RankNode) -> list[Tensor]:
    assert node.plan is not None
    found = [as_tensor(node.mean(b.id), torch_dtype(b.dtype)).clone() for b in node.plan.buckets]
    node.release_means()
    return found


def begin(node: WorkerNode, layout: Layout, plan: Plan) -> list[Tensor]:
    """Join, and return what the chief began with."""
    assert isinstance(node, RankNode)
    node.wait_until_member()
    node.prepare(plan, layout)
    if node.task == CHIEF:
        for bucket, values in enumerate(given(0, -1, plan)):
            fill(node, bucket, values)
        node.offer_initial()
    node.wait_version(0)
    return means_of(node)


def average(node: WorkerNode, step: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """One step; None: this rank has no gradient for that bucket."""
    assert isinstance(node, RankNode)
    node.begin_step(step)
    for bucket, values in enumerate(gradients):
        if values is not None:
            fill(node, bucket, values)
            node.produced(step, bucket, values.nbytes)
    node.seal(step, tuple(bucket for bucket, values in enumerate(gradients) if values is None))
    node.wait_version(step + 1)
    return means_of(node)


def planned(ranks: int, entries: Sequence[ParameterEntry] = ENTRIES) -> tuple[Plan, Layout]:
    plan = make_plan(entries, ranks, BUCKET_BYTES)
    return plan, Layout(plan.hash, BUCKET_BYTES, tuple(entries), (MEAN, CHIEFS))


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm", "auto"])
def test_every_rank_gets_the_mean_in_the_order_of_ranks(protocol: str, ranks: int) -> None:
    plan, layout = planned(ranks)
    found: dict[int, list[list[Tensor]]] = {}

    def train(node: WorkerNode) -> None:
        mine = found[node.task.index] = [begin(node, layout, plan)]
        mine += [average(node, step, given(node.task.index, step, plan)) for step in range(STEPS)]
        node.finish(STEPS)

    with in_process_cluster(ClusterShape(0, ranks), MeanStore, protocol=protocol) as cluster:
        cluster.run(train)
    for rank in range(ranks):
        assert_same(found[rank][0], given(0, -1, plan))
        for step in range(STEPS):
            of_all = zip(*(given(other, step, plan) for other in range(ranks)), strict=True)
            assert_same(found[rank][step + 1], [mean(gradients) for gradients in of_all])


def test_more_ranks_than_buckets() -> None:
    entries = (ParameterEntry("only", 16, "float32", 0),)
    plan, layout = planned(3, entries)

    def train(node: WorkerNode) -> None:
        begin(node, layout, plan)
        for step in range(STEPS):
            values = torch.full((16,), float(node.task.index + step))
            assert_same(average(node, step, [values]), [torch.full((16,), 1.0 + step)])
        node.finish(STEPS)

    with in_process_cluster(ClusterShape(0, 3), MeanStore) as cluster:
        cluster.run(train)


def test_a_rank_without_a_gradient_counts_as_one_of_zeros() -> None:
    plan, layout = planned(2)

    def train(node: WorkerNode) -> None:
        begin(node, layout, plan)
        mine: list[Tensor | None] = list(given(node.task.index, 0, plan))
        if node.task == CHIEF:
            mine[0] = None
        mine[1] = None
        found = average(node, 0, mine)
        assert torch.equal(found[0], given(1, 0, plan)[0] / 2)
        assert not found[1].any()
        node.finish(1)

    with in_process_cluster(ClusterShape(0, 2), MeanStore) as cluster:
        cluster.run(train)


def test_of_buffers_the_chiefs_values_count() -> None:
    entries = (ParameterEntry("weight", 40, "float32", 0), ParameterEntry("running_mean", 40, "float32", 1))
    plan, layout = planned(2, entries)
    buffers = next(bucket.id for bucket in plan.buckets if bucket.group == 1)

    def train(node: WorkerNode) -> None:
        begin(node, layout, plan)
        mine: list[Tensor | None] = list(given(node.task.index, 0, plan))
        if node.task != CHIEF:
            mine[buffers] = None
        assert torch.equal(average(node, 0, mine)[buffers], given(0, 0, plan)[buffers])
        node.finish(1)

    with in_process_cluster(ClusterShape(0, 2), MeanStore) as cluster:
        cluster.run(train)


def test_a_step_of_values_gives_every_rank_the_chiefs() -> None:
    plan, layout = planned(3)

    def train(node: WorkerNode) -> None:
        assert isinstance(node, RankNode)
        begin(node, layout, plan)
        average(node, 0, given(node.task.index, 0, plan))
        node.begin_step(1)
        if node.task == CHIEF:
            for bucket, values in enumerate(given(0, 7, plan)):
                fill(node, bucket, values)
                node.produced(1, bucket)
        absent = () if node.task == CHIEF else tuple(bucket.id for bucket in plan.buckets)
        node.seal(1, absent, values=True)
        node.wait_version(2)
        assert_same(means_of(node), given(0, 7, plan))
        node.finish(2)

    with in_process_cluster(ClusterShape(0, 3), MeanStore) as cluster:
        cluster.run(train)


def test_gradients_of_16_bits_are_widened_before_they_are_added_up() -> None:
    entries = (ParameterEntry("weight", 100, "float32", 0),)
    plan, layout = planned(2, entries)
    narrow = [[values.to(torch.bfloat16) for values in given(rank, 0, plan)] for rank in range(2)]

    def train(node: WorkerNode) -> None:
        begin(node, layout, plan)
        expected = [mean([g.float() for g in pair]) for pair in zip(*narrow, strict=True)]
        assert_same(average(node, 0, narrow[node.task.index]), expected)
        node.finish(1)

    with in_process_cluster(ClusterShape(0, 2), lambda: MeanStore(WireFormat("bfloat16"))) as cluster:
        cluster.run(train)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_failure_of_one_rank_ends_the_job_and_names_it(lost: int) -> None:
    plan, layout = planned(3)
    endings: dict[int, JobEndedError] = {}

    def train(node: WorkerNode) -> None:
        begin(node, layout, plan)
        try:
            for step in range(STEPS):
                if node.task.index == lost and step == 2:
                    node.fail(Reason(Cause.FAILED, "out of luck"))
                    return
                average(node, step, given(node.task.index, step, plan))
        except JobEndedError as ended:
            endings[node.task.index] = ended

    with in_process_cluster(ClusterShape(0, 3), MeanStore) as cluster:
        cluster.run(train)
    others = {0, 1, 2} - {lost}
    assert endings.keys() == others
    for rank in others:
        assert endings[rank].outcome.culprit == str(worker(lost))


def test_a_rank_with_another_model_ends_the_job_and_is_named() -> None:
    plan, layout = planned(2)
    other_plan, other_layout = planned(2, (*ENTRIES, ParameterEntry("fourth", 8, "float32", 0)))

    def train(node: WorkerNode) -> None:
        if node.task == CHIEF:
            begin(node, layout, plan)
            average(node, 0, given(0, 0, plan))
        else:
            begin(node, other_layout, other_plan)

    with in_process_cluster(ClusterShape(0, 2), MeanStore) as cluster, pytest.raises(JobEndedError) as ended:
        cluster.run(train)
    assert ended.value.outcome.culprit == str(worker(1))
    assert ended.value.outcome.reason.cause is Cause.MISMATCH
