"""Forward begins while parameters of later layers are on their way, and never uses a stale one."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.cluster import in_process_cluster
from helpers.reasons import because
from lockstep.protocol.core.effects import VersionReady
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.outcome import JobEndedError, Outcome
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.binding import Bound
from lockstep.training.worker.layer_waits import LayerWaits
from lockstep.training.worker.replica import Replica, Trained

STEPS = 6
RATE = GroupRates(("lr",), (0.1,))
ENTRY = OptimizerEntry("SGD", json.dumps({"lr": 0.1}))


def three_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Tied(nn.Module):
    """Its head reads the weight of a layer that is called only afterwards, and of one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 16)
        self.never_called = nn.Linear(8, 16)
        self.last = nn.Linear(16, 8)
        self.odd_use = False

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.first(given) + functional.linear(given, self.never_called.weight)
        if self.odd_use:
            return functional.linear(hidden, self.last.weight)
        result: Tensor = self.last(hidden)
        return result


class HeldBack:
    """Keeps the first bucket, which is of the last layer, from a worker until its first layer has run."""

    def __init__(self, node: WorkerNode, first_layer: nn.Module, held_from: int) -> None:
        self._node = node
        self._side = node.training
        self._deliver = node.effects[VersionReady]
        self._held_from = held_from
        self._waiting: dict[int, VersionReady] = {}
        self._ran: set[int] = set()
        self.overtaken: list[int] = []
        node.effects[VersionReady] = self._on_version_ready
        self.step = -1
        first_layer.register_forward_hook(self._on_first_layer)

    def _on_version_ready(self, effect: VersionReady) -> None:
        if effect.bucket == 0 and effect.version >= self._held_from and effect.version not in self._ran:
            self._waiting[effect.version] = effect
        else:
            self._deliver(effect)

    def _on_first_layer(self, *_: object) -> None:
        if self.step >= self._held_from:
            assert self._side._versions[0] < self.step, "the bucket was to be held back"
            self.overtaken.append(self.step)
            step = self.step
            self._node.loop.call(lambda: self._let_go(step))

    def _let_go(self, step: int) -> None:
        self._ran.add(step)
        if step in self._waiting:
            self._deliver(self._waiting.pop(step))


def run(
    model: nn.Module,
    protocol: str,
    *,
    layers: bool,
    hold: Callable[[WorkerNode], HeldBack] | None = None,
    before_step: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Train as one worker of one server; its final parameters."""

    def train(node: WorkerNode) -> None:
        node.wait_until_member()
        trained = [Trained(name, p, 0) for name, p in model.named_parameters()]
        replica = Replica(node, trained, (ENTRY,), 256, own_copy=False, model=model, layers=model if layers else None)
        held = hold(node) if hold is not None else None
        replica.start()
        for step in range(STEPS):
            before_step(step)
            if held is not None:
                held.step = step
            replica.begin(step, (RATE,))
            given = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            model(given).square().sum().backward()
            replica.end()
            if held is not None and step == STEPS - 1:
                node.loop.call(lambda: held._let_go(STEPS))
        replica.settle()
        replica.close()
        node.finish(STEPS)

    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, protocol=protocol) as cluster:
        cluster.run(train)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_the_first_layer_runs_while_the_last_ones_parameters_are_held_back(protocol: str) -> None:
    model, plain = three_layers(), three_layers()
    made: list[HeldBack] = []

    def hold(node: WorkerNode) -> HeldBack:
        made.append(HeldBack(node, model[0], held_from=2))
        return made[0]

    held_back = run(model, protocol, layers=True, hold=hold)
    expected = run(plain, protocol, layers=False)
    assert made[0].overtaken == list(range(2, STEPS))
    assert all(torch.equal(held_back[name], value) for name, value in expected.items())


@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_a_parameter_that_is_used_without_its_layer_is_waited_for_first(protocol: str) -> None:
    model = Tied()
    plain = copy.deepcopy(model)
    result = run(model, protocol, layers=True)
    expected = run(plain, protocol, layers=False)
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_what_is_used_without_its_layer_is_learned_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    early: set[str] = set()
    original = Replica._need

    def noting(self: Replica, some: list[object]) -> None:
        if self.step > 0 and self._layer_waits is not None:
            early.update(bound.trained.name for bound in self._layer_waits._early.values())
        original(self, some)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "_need", noting)
    run(Tied(), "grpc", layers=True)
    assert early == {"never_called.weight"}


def test_a_use_that_changes_after_the_first_step_is_named() -> None:
    model = Tied()

    def before_step(step: int) -> None:
        model.odd_use = step == 3

    with pytest.raises(RuntimeError, match=r"last\.weight was used in step 3 without calling the layer"):
        run(model, "grpc", layers=True, before_step=before_step)


def test_a_job_that_ends_while_a_layer_waits_is_told_to_the_training_thread() -> None:
    model = three_layers()
    ended = threading.Event()

    def hold(node: WorkerNode) -> HeldBack:
        held = HeldBack(node, model[4], held_from=2)  # never: its own hook comes first

        def fail(*_: object) -> None:
            if held.step == 2:
                ended.set()
                node.fail(because("the test ends it"))

        model[0].register_forward_hook(fail)
        return held

    with pytest.raises(Exception, match="the test ends it"):
        run(model, "grpc", layers=True, hold=hold)
    assert ended.is_set()


@pytest.mark.filterwarnings("error")
def test_a_job_that_ends_inside_forward_raises_its_error_and_no_warning() -> None:
    """Both the wait of a layer and the one after forward fail then; torch would warn about the second."""
    model, ended = three_layers(), because("ended")

    def fail(*_: object) -> None:
        raise JobEndedError(Outcome(False, reason=ended))

    named, room = enumerate(model.named_parameters()), torch.empty(0)
    bound = [Bound(Trained(name, one, 0), index, room, room, room, (index,), room) for index, (name, one) in named]
    LayerWaits(model, bound, fail, fail)
    with pytest.raises(JobEndedError):
        model(torch.ones(2, 8))
