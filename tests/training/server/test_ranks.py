"""Ranks in one process: each lends its gradients, and gets the same mean as every other, whatever carries it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cluster import in_process_cluster
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, ClusterShape, worker
from lockstep.protocol.core.messages import Layout, ParameterEntry, Ticket, VersionNote
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.task.connection import Connection
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.mean_store import CHIEFS, MEAN, MeanStore, OwnGradients
from lockstep.training.tensors import as_tensor, torch_dtype
from lockstep.training.wire_format import WireFormat
from lockstep.transports.control.codec import decode_note

PATIENCE = 20.0
MARK = VersionNote(-1, 0)
"""Of a version that nobody asks for."""
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


def as_bytes(values: Tensor) -> memoryview:
    flat: Any = values.view(torch.uint8).numpy()
    return memoryview(flat)


def fill(node: WorkerNode, bucket: int, values: Tensor) -> None:
    assert node.plan is not None
    assert node.gradients is not None
    whole = node.plan.buckets[bucket]
    place = node.gradients.buffer[whole.arena_offset : whole.arena_offset + values.nbytes]
    as_tensor(place, values.dtype).copy_(values)


def means_of(node: WorkerNode) -> list[Tensor]:
    assert node.plan is not None
    assert node.means is not None
    found = [as_tensor(node.means.of(b.id), torch_dtype(b.dtype)).clone() for b in node.plan.buckets]
    node.means.release()
    return found


def begin(node: WorkerNode, layout: Layout, plan: Plan) -> list[Tensor]:
    """Join, and return what the chief began with."""
    assert node.means is not None
    node.wait_until_member()
    node.means.prepare(plan, layout)
    if node.task == CHIEF:
        for bucket, values in enumerate(given(0, -1, plan)):
            fill(node, bucket, values)
        node.offer_initial()
    node.wait_version(0)
    return means_of(node)


def average(node: WorkerNode, step: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """One step; None: this rank has no gradient for that bucket."""
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
@pytest.mark.parametrize("protocol", ["grpc", "grpc+tcp", "grpc+shm", "auto"])
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


def test_a_mean_lands_where_the_gradient_was_and_one_that_is_sent_again_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither before the next version is asked for nor after: the program may have clipped it by then."""
    plan, layout = planned(2)
    sent: list[tuple[Connection, tuple[Any, ...]]] = []
    write, arrived = Connection.write_version, Connection.on_arrived
    through, turns = threading.Event(), threading.Barrier(2, timeout=PATIENCE)

    def note_sent(connection: Connection, *given: Any) -> None:
        sent.append((connection, given))
        write(connection, *given)

    def note_arrived(connection: Connection, note: bytes, nbytes: int) -> None:
        if decode_note(note) == MARK:
            through.set()
        arrived(connection, note, nbytes)

    monkeypatch.setattr(Connection, "write_version", note_sent)
    monkeypatch.setattr(Connection, "on_arrived", note_arrived)

    def send_again() -> None:
        """All means of step 0 once more to the chief, and after them a mark."""
        to_chief = [one for one in sent if one[0].peer == CHIEF]
        first: Ticket = next(given[4] for _, given in to_chief if given[0].version == 0)
        again = [one for one in to_chief if one[1][0].version == 1]
        assert again
        for connection, given in again:
            write(connection, *given)
        connection, (_, source, offset, _, _, _) = again[0]
        write(connection, MARK, source, offset, 0, first, 0)

    def train(node: WorkerNode) -> None:
        begin(node, layout, plan)
        average(node, 0, given(node.task.index, 0, plan))
        assert node.gradients is not None
        assert node.means is not None
        for before in ("the next step begins", "the step after that"):
            whole = as_tensor(node.gradients.buffer, torch.uint8)
            if node.task == CHIEF:
                theirs = [b for b in plan.buckets if b.server == 1]
                places = [slice(b.arena_offset, b.arena_offset + b.nbytes) for b in theirs]
                means = [as_tensor(node.means.of(b.id), torch.uint8) for b in theirs]
                assert all(one.data_ptr() == whole[at].data_ptr() for one, at in zip(means, places, strict=True))
                whole.fill_(7)
            turns.wait()
            if node.task == CHIEF:
                assert through.wait(PATIENCE)
                assert bool((whole == 7).all()), before
                through.clear()
            else:
                send_again()
            turns.wait()
            if before == "the next step begins":
                average(node, 1, given(node.task.index, 1, plan))
        node.finish(2)

    with in_process_cluster(ClusterShape(0, 2), MeanStore, protocol="grpc+tcp") as cluster:
        cluster.run(train)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mean_replaces_the_gradient_of_the_rank_that_makes_it(ranks: int) -> None:
    plan, layout = planned(1)
    slots = [memoryview(bytearray(plan.shard_room(0))) for _ in range(2)]
    me, replaced = worker(ranks - 1), dict[int, int]()
    store = MeanStore(own=OwnGradients(me, replaced))
    store.prepare(layout, plan, 0, slots)
    of_all = [given(rank, 0, plan) for rank in range(ranks)]
    for bucket in plan.buckets:
        gradients = [one[bucket.id].clone() for one in of_all]
        buffers = [as_bytes(one) for one in gradients]
        tasks = tuple(worker(rank) for rank in range(ranks))
        store.begin(Apply(0, bucket.id, tasks, tuple(range(ranks)), ranks, (), 0, 1), buffers, lambda _error: None)
        expected = mean([one[bucket.id] for one in of_all])
        made = slots[1][bucket.shard_offset : bucket.shard_offset + bucket.nbytes]
        assert torch.equal(as_tensor(made, expected.dtype), expected)
        assert torch.equal(gradients[-1], expected)
        assert all(torch.equal(one, other[bucket.id]) for one, other in zip(gradients[:-1], of_all, strict=False))
        gradients[-1].fill_(7)  # the program clips it; what others read stays
        assert torch.equal(as_tensor(made, expected.dtype), expected)
    assert replaced == {bucket.id: 1 for bucket in plan.buckets}


def test_what_this_rank_did_not_give_or_gave_in_fewer_bytes_is_not_replaced() -> None:
    plan, layout = planned(1, (ParameterEntry("weight", 100, "float32", 0),))
    slots = [memoryview(bytearray(plan.shard_room(0))) for _ in range(2)]
    replaced: dict[int, int] = {}
    store = MeanStore(WireFormat("bfloat16"), own=OwnGradients(worker(0), replaced))
    store.prepare(layout, plan, 0, slots)
    elements = plan.buckets[0].nbytes // 4
    narrow = [torch.ones(elements, dtype=torch.bfloat16) for _ in range(2)]
    for tasks in ((worker(0), worker(1)), (worker(1),)):
        buffers = [as_bytes(one) for one in narrow[: len(tasks)]]
        effect = Apply(0, 0, tasks, tuple(range(len(tasks))), 2, (), 0, 1)
        store.begin(effect, buffers, lambda _error: None)
    assert replaced == {}
    assert all(bool((one == 1).all()) for one in narrow)


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
