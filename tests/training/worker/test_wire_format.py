"""Gradients that travel in 16 bits: rounded once, added up in 32 bits, and half the bytes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import make_plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.replica import Replica, Trained

STEPS = 5
RATE = 0.25
"""A power of two, so that the update is exact and the order of its operations cannot matter."""

SHAPE = ClusterShape(2, 3)
BUCKET_BYTES = 4096


def small_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 3))


def gradients_of(model: nn.Module, worker: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * worker + step)
    model(torch.randn(4, 20, generator=generator)).square().mean().backward()


def rounded_reference(dtype: torch.dtype) -> dict[str, Tensor]:
    """One process that rounds each worker's gradients, widens them, and then takes their mean in worker order."""
    start = small_model()
    for step in range(STEPS):
        rounded = []
        for worker in range(SHAPE.workers):
            model = copy.deepcopy(start)
            gradients_of(model, worker, step)
            rounded.append([p.grad.to(dtype).float() for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            for parameter, *gradients in zip(start.parameters(), *rounded, strict=True):
                total = gradients[0]
                for gradient in gradients[1:]:
                    total = total + gradient
                parameter.add_(total / SHAPE.workers, alpha=-RATE)
    return {name: p.detach() for name, p in start.named_parameters()}


def train(node: WorkerNode, model: nn.Module, wire: WireFormat) -> None:
    trained = [Trained(name, p, 0) for name, p in model.named_parameters()]
    node.wait_until_member()
    entry = OptimizerEntry("SGD", json.dumps({"lr": RATE}))
    replica = Replica(node, trained, (entry,), BUCKET_BYTES, own_copy=False, model=model, wire=wire)
    replica.start()
    for step in range(STEPS):
        replica.begin(step, (GroupRates(("lr",), (RATE,)),))
        gradients_of(model, node.task.index, step)
        replica.end()
    replica.close()
    node.finish(STEPS)


@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_cluster_gives_the_bits_of_rounded_gradients_added_up_in_32_bits(name: str, protocol: str) -> None:
    torch.set_num_threads(1)
    wire = WireFormat(name)
    expected = rounded_reference(torch.bfloat16 if name == "bfloat16" else torch.float16)
    models = [small_model() for _ in range(SHAPE.workers)]
    with in_process_cluster(SHAPE, lambda: TorchShardStore(wire=wire), protocol=protocol) as cluster:
        cluster.run(lambda node: train(node, models[node.task.index], wire))
    for model in models:
        for parameter_name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[parameter_name]), parameter_name


def bytes_of_a_run(wire: WireFormat) -> tuple[int, int]:
    """What one worker sent, and what its parameters are in bytes."""
    counted: list[int] = []

    def body(node: WorkerNode) -> None:
        node.wait_until_member()
        connection = next(iter(node.peers.values())).connection
        train(node, small_model(), wire)
        assert connection is not None
        assert connection.endpoint is not None
        counted.append(connection.endpoint.counters().bytes_sent)

    with in_process_cluster(ClusterShape(1, 1), lambda: TorchShardStore(wire=wire)) as cluster:
        cluster.run(body)
        plan = cluster.workers[0].plan
        assert plan is not None
    return counted[0], plan.arena_bytes


def test_narrow_gradients_are_half_the_bytes() -> None:
    sent, whole = bytes_of_a_run(WireFormat())
    assert sent == whole * (STEPS + 1)
    # The chief's initial parameters travel whole, and before the first step.
    sent, whole = bytes_of_a_run(WireFormat("bfloat16"))
    assert sent == whole + whole // 2 * STEPS


def test_sizes_that_fit_no_format_are_refused() -> None:
    plan = make_plan([ParameterEntry("weight", 100, "float32", 0)], 1)
    wire = WireFormat("bfloat16")
    [bucket] = plan.buckets
    assert wire.dtype_of(bucket, bucket.nbytes) is torch.float32
    assert wire.dtype_of(bucket, bucket.nbytes // 2) is torch.bfloat16
    with pytest.raises(ValueError, match="7 bytes arrived for bucket 0"):
        wire.dtype_of(bucket, 7)
    with pytest.raises(ValueError, match="arrived for bucket 0"):
        WireFormat().dtype_of(bucket, bucket.nbytes // 2)


def test_other_types_than_float32_travel_as_they_are() -> None:
    [bucket] = make_plan([ParameterEntry("weight", 100, "float64", 0)], 1).buckets
    assert WireFormat("bfloat16").nbytes(bucket) == bucket.nbytes
