"""Weights in another order of dimensions (channels_last) keep it in a cluster, and give the bits of one process."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.replica import Replica, Trained

STEPS = 3
RATE = 0.25
SHAPE = ClusterShape(2, 2)


def model_in(format_: torch.memory_format) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8 * 9, 3))
    return model.to(memory_format=format_)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks it


def gradients_of(model: nn.Module, worker: int, step: int, format_: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(100 * worker + step)
    pictures = torch.randn(2, 4, 5, 5, generator=generator).contiguous(memory_format=format_)
    model(pictures).square().mean().backward()


def in_one_process(formats: list[torch.memory_format]) -> dict[str, Tensor]:
    start = model_in(torch.contiguous_format)
    for step in range(STEPS):
        sums: list[Tensor] | None = None
        for worker, format_ in enumerate(formats):
            model = model_in(format_)
            model.load_state_dict(copy.deepcopy(start.state_dict()))
            gradients_of(model, worker, step, format_)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
        assert sums is not None
        with torch.no_grad():
            for parameter, total in zip(start.parameters(), sums, strict=True):
                parameter.add_(total / len(formats), alpha=-RATE)
    return {name: p.detach() for name, p in start.named_parameters()}


LAST, FIRST = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize("own_copy", [False, True])
@pytest.mark.parametrize("formats", [[LAST, LAST], [LAST, FIRST]], ids=["both", "only one"])
@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_a_cluster_gives_the_bits_of_one_process(
    protocol: str, formats: list[torch.memory_format], own_copy: bool
) -> None:
    torch.set_num_threads(1)
    models = [model_in(format_) for format_ in formats]
    expected = in_one_process(formats)

    def train(node: WorkerNode) -> None:
        worker = node.task.index
        model = models[worker]
        node.wait_until_member()
        trained = [Trained(name, p, 0) for name, p in model.named_parameters()]
        entry = OptimizerEntry("SGD", json.dumps({"lr": RATE}))
        replica = Replica(node, trained, (entry,), 256, own_copy=own_copy)
        replica.start()
        for step in range(STEPS):
            for parameter in model.parameters():
                if parameter.dim() == 4:
                    assert parameter.is_contiguous(memory_format=formats[worker])
            replica.begin(step, (GroupRates(("lr",), (RATE,)),))
            gradients_of(model, worker, step, formats[worker])
            replica.end()
        replica.close()
        node.finish(STEPS)

    with in_process_cluster(SHAPE, TorchShardStore, protocol=protocol) as cluster:
        cluster.run(train)
    for model in models:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
