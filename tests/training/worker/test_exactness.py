"""Synchronous training on W workers equals, bit for bit, one process that averages their gradients in worker order."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import InProcessCluster, in_process_cluster
from helpers.transports import RUN_HERE
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.journal import Happening
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.tensors import entry_of
from lockstep.training.worker.replica import Replica, Trained

STEPS = 20
BUCKET_BYTES = 4096
"""Small, so that the linear layer is cut into several buckets and both servers have work."""

OPTIMIZERS: dict[str, tuple[str, dict[str, object]]] = {
    "sgd": ("SGD", {"lr": 0.05, "weight_decay": 1e-4}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "eps": 1.0}),
    "adam": ("Adam", {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}),
    "adamw": ("AdamW", {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}),
}


def small_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 8 * 8, 24),
        nn.ReLU(),
        nn.Linear(24, 5),
    )


def trained_of(model: nn.Module) -> list[Trained]:
    """Batch-norm in a group of its own, as the benchmark has it."""
    return [Trained(name, p, 1 if name.startswith("1.") else 0) for name, p in model.named_parameters()]


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def learning_rate(base: float, step: int) -> float:
    return base / (1 + step)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    images, labels = batch(worker, step)
    return nn.functional.cross_entropy(model(images), labels)


def reference(shape: ClusterShape, kind: str, options: dict[str, object]) -> dict[str, Tensor]:
    """One process: the mean of the workers' gradients in their order, the same optimizer on the same flat buckets."""
    start = small_model()
    models = [copy.deepcopy(start) for _ in range(shape.workers)]
    entries = [entry_of(t.name, t.parameter, t.group) for t in trained_of(start)]
    plan = make_plan(entries, shape.servers, BUCKET_BYTES)
    values = pack(plan, [p.detach() for p in start.parameters()])
    flat = [nn.Parameter(value, requires_grad=False) for value in values]
    optimizers = [getattr(torch.optim, kind)([value], **options) for value in flat]
    base = float(options["lr"])  # type: ignore[arg-type]
    for step in range(STEPS):
        gradients = []
        for worker, model in enumerate(models):
            unpack(plan, flat, list(model.parameters()))
            model.zero_grad()
            loss_of(model, worker, step).backward()
            gradients.append(pack(plan, [p.grad for p in model.parameters() if p.grad is not None]))
        for index, value in enumerate(flat):
            total = gradients[0][index].clone()
            for others in gradients[1:]:
                total += others[index]
            value.grad = total / shape.workers if shape.workers > 1 else total
            optimizers[index].param_groups[0]["lr"] = learning_rate(base, step)
            optimizers[index].step()
    unpack(plan, flat, list(start.parameters()))
    return {name: p.detach().clone() for name, p in start.named_parameters()}


def pack(plan: Plan, tensors: list[Tensor]) -> list[Tensor]:
    packed = []
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.nbytes // 4)
        for piece in bucket.pieces:
            source = tensors[piece.parameter].reshape(-1)[piece.first : piece.first + piece.elements]
            flat[piece.offset // 4 : piece.offset // 4 + piece.elements] = source
        packed.append(flat)
    return packed


def unpack(plan: Plan, flat: list[nn.Parameter], parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for bucket in plan.buckets:
            for piece in bucket.pieces:
                values = flat[bucket.id][piece.offset // 4 : piece.offset // 4 + piece.elements]
                parameters[piece.parameter].reshape(-1)[piece.first : piece.first + piece.elements] = values


def train_cluster(
    cluster: InProcessCluster, kind: str, options: dict[str, object], *, own_copy: bool, direct: bool = True
) -> list[dict[str, Tensor]]:
    """Train every worker; their final parameters, by worker. ``direct``: linear layers write into their buckets."""
    models = [small_model() for _ in cluster.workers]
    for model in models[1:]:
        with torch.no_grad():  # only the chief's initial values may count
            for parameter in model.parameters():
                parameter.add_(1.0)
    entries = tuple(OptimizerEntry(kind, json.dumps(options)) for _ in range(2))
    base = float(options["lr"])  # type: ignore[arg-type]

    def train(node: WorkerNode) -> None:
        worker = node.task.index
        model = models[worker]
        node.wait_until_member()
        taken_over = model if direct else None
        replica = Replica(
            node, trained_of(model), entries, BUCKET_BYTES, own_copy=own_copy, model=taken_over, layers=model
        )
        replica.start()
        for step in range(STEPS):
            rate = GroupRates(("lr",), (learning_rate(base, step),))
            replica.begin(step, (rate, rate))
            loss_of(model, worker, step).backward()
            replica.end()
        replica.settle()
        # All four tensors of the two linear layers but in the first step, which goes the plain way.
        assert replica.copies.gradients_in_place == (4 * (STEPS - 1) if direct else 0)
        assert replica.copies.gradients_copied + replica.copies.gradients_in_place == 8 * STEPS
        replica.close()
        node.finish(STEPS)

    cluster.run(train)
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


QUICK = ((1, 2), (2, 3))
SHAPES = [
    pytest.param(ClusterShape(*counts), marks=() if counts in QUICK else pytest.mark.slow)
    for counts in itertools.product((1, 2), (1, 2, 3))
]


@pytest.mark.parametrize("own_copy", [False, True], ids=["parameter_server", "distributed_replicated"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.workers}workers-{s.servers}servers")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_cluster_gives_the_bits_of_one_process(optimizer: str, shape: ClusterShape, own_copy: bool) -> None:
    kind, options = OPTIMIZERS[optimizer]
    expected = reference(shape, kind, dict(options))
    with in_process_cluster(shape, TorchShardStore) as cluster:
        results = train_cluster(cluster, kind, dict(options), own_copy=own_copy)
        check_journals(cluster, shape)
    for result in results:
        for name, value in expected.items():
            assert torch.equal(result[name], value), f"{name} differs by {(result[name] - value).abs().max()}"


def test_copied_gradients_give_the_same_bits_as_gradients_computed_in_place() -> None:
    shape = ClusterShape(1, 2)
    kind, options = OPTIMIZERS["momentum"]
    expected = reference(shape, kind, dict(options))
    with in_process_cluster(shape, TorchShardStore) as cluster:
        results = train_cluster(cluster, kind, dict(options), own_copy=False, direct=False)
    for result in results:
        assert all(torch.equal(result[name], value) for name, value in expected.items())


MANY, FEW = [ClusterShape(1, 2), ClusterShape(2, 3)], [ClusterShape(1, 2), ClusterShape(2, 1)]
OTHER_TRANSPORTS = [
    # Each end of each link has an agent of NIXL: too many of them for one process that holds a whole cluster.
    pytest.param(name, shape, id=f"{name}-{shape.workers}workers-{shape.servers}servers")
    for name in RUN_HERE
    if name != "grpc"
    for shape in (FEW if name == "grpc+ucx" else MANY)
]


@pytest.mark.slow
@pytest.mark.parametrize("own_copy", [False, True], ids=["parameter_server", "distributed_replicated"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize(("protocol", "shape"), OTHER_TRANSPORTS)
def test_every_transport_gives_the_same_bits(
    protocol: str, optimizer: str, shape: ClusterShape, own_copy: bool
) -> None:
    kind, options = OPTIMIZERS[optimizer]
    expected = reference(shape, kind, dict(options))
    with in_process_cluster(shape, TorchShardStore, protocol=protocol) as cluster:
        results = train_cluster(cluster, kind, dict(options), own_copy=own_copy)
        check_journals(cluster, shape)
    for result in results:
        for name, value in expected.items():
            assert torch.equal(result[name], value), f"{name} differs by {(result[name] - value).abs().max()}"


def check_journals(cluster: InProcessCluster, shape: ClusterShape) -> None:
    """No bucket of version s+1 leaves before every worker's gradient of it for step s has arrived."""
    delivered = 0
    for node in cluster.servers:
        arrived: dict[tuple[int, int], set[int]] = {}
        for record in node.journal:
            if record.happening is Happening.ARRIVED and record.peer is not None:
                arrived.setdefault((record.step, record.bucket), set()).add(record.peer.index)
            elif record.happening is Happening.IN_FLIGHT and record.step > 0:
                delivered += 1
                assert arrived.get((record.step - 1, record.bucket)) == set(range(shape.workers))
    assert delivered == STEPS * shape.workers * len(cluster.workers[0].plan.buckets)  # type: ignore[union-attr]
