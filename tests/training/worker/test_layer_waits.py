"""Forward begins while parameters of later layers are on their way, and nothing ever uses a stale one."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from helpers.cluster import in_process_cluster
from helpers.holding_store import HoldingStore
from helpers.reasons import because
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.outcome import JobEndedError, Outcome
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.binding import Bound
from lockstep.training.worker.layer_waits import LayerWaits
from lockstep.training.worker.replica import Replica, Trained

STEPS = 6
HELD_FROM = 2
"""The first step whose forward begins without the last layer's parameters."""
RATE = GroupRates(("lr",), (0.1,))
ENTRY = OptimizerEntry("SGD", json.dumps({"lr": 0.1}))
PROTOCOLS = ["grpc", "grpc+shm"]


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> None:
    """Another test of this process may have compiled something, after which each version is awaited as a whole."""
    if (compiler := sys.modules.get("torch._dynamo.utils")) is not None:
        compiler.counters.clear()


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


def run(
    model: nn.Module,
    protocol: str,
    *,
    layers: bool,
    store: TorchShardStore | None = None,
    before_step: Callable[[WorkerNode, int], None] = lambda _node, _step: None,
) -> dict[str, Tensor]:
    """Train as one worker of one server; its final parameters."""

    def train(node: WorkerNode) -> None:
        node.wait_until_member()
        trained = [Trained(name, p, 0) for name, p in model.named_parameters()]
        replica = Replica(node, trained, (ENTRY,), 256, own_copy=False, model=model, layers=model if layers else None)
        with contextlib.closing(replica):
            replica.start()
            for step in range(STEPS):
                before_step(node, step)
                replica.begin(step, (RATE,))
                given = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
                model(given).square().sum().backward()
                replica.end()
            if isinstance(store, HoldingStore):
                store.let_go(STEPS - 1)
            replica.settle()
        node.finish(STEPS)

    with in_process_cluster(ClusterShape(1, 1), lambda: store or TorchShardStore(), protocol=protocol) as cluster:
        cluster.run(train)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_held(model: nn.Module, first: nn.Module, protocol: str) -> tuple[dict[str, Tensor], list[int]]:
    """As ``run``, where the last bucket of each version comes only when ``first`` has run; and the steps of which it
    did before."""
    store = HoldingStore(HELD_FROM - 1)
    overtaken: list[int] = []
    at: list[tuple[WorkerNode, int]] = []

    def on_first(*_: object) -> None:
        node, step = at[-1]
        if step >= HELD_FROM:
            assert not node.has_version(step), "the bucket was to be held back"
            overtaken.append(step)
            store.let_go(step - 1)

    first.register_forward_hook(on_first)
    found = run(model, protocol, layers=True, store=store, before_step=lambda node, step: at.append((node, step)))
    return found, overtaken


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_first_layer_runs_while_the_last_ones_parameters_are_held_back(protocol: str) -> None:
    model, plain = three_layers(), three_layers()
    held_back, overtaken = run_held(model, model[0], protocol)
    expected = run(plain, protocol, layers=False)
    assert overtaken == list(range(HELD_FROM, STEPS))
    assert all(torch.equal(held_back[name], value) for name, value in expected.items())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_parameter_that_is_used_without_its_layer_is_waited_for(protocol: str) -> None:
    """Also where a step uses it in another way than all steps before."""
    model = Tied()
    plain = copy.deepcopy(model)

    def odd_in_step_3(of: Tied) -> Callable[[WorkerNode, int], None]:
        def before_step(_: WorkerNode, step: int) -> None:
            of.odd_use = step == 3

        return before_step

    result = run(model, protocol, layers=True, before_step=odd_in_step_3(model))
    expected = run(plain, protocol, layers=False, before_step=odd_in_step_3(plain))
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_a_job_that_ends_while_a_layer_waits_is_told_to_the_training_thread() -> None:
    model, store = three_layers(), HoldingStore(HELD_FROM - 1)
    at: list[tuple[WorkerNode, int]] = []
    ended = threading.Event()

    def fail(*_: object) -> None:
        node, step = at[-1]
        if step == HELD_FROM:
            ended.set()
            node.fail(because("the test ends it"))

    model[0].register_forward_hook(fail)
    with pytest.raises(Exception, match="the test ends it"):
        run(model, "grpc", layers=True, store=store, before_step=lambda node, step: at.append((node, step)))
    assert ended.is_set()


# -- which uses are noticed --


class Awaited:
    """A model of which nothing is here yet, and what was waited for."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.waited: list[str] = []
        self.here: set[int] = set()
        self.bound = [
            Bound(Trained(name, one, 0), index, one.data, one.data, (index,), one.data)
            for index, (name, one) in enumerate(model.named_parameters())
        ]
        self.weight, self.bias = (one.trained.parameter for one in self.bound[:2])
        self.waits = LayerWaits([model], self.bound, self._need, self._need_all)

    def _need_all(self) -> None:
        self._need([one for one in self.bound if one.index not in self.here])
        self.here.clear()
        self.waits.end()

    def _need(self, some: object) -> None:
        assert isinstance(some, list)
        self.waited += [one.trained.name for one in some]
        self.here.update(one.index for one in some)


@pytest.fixture
def awaited() -> Iterator[Awaited]:
    made = Awaited(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)))
    assert made.waits.begin()
    yield made
    made.waits.close()
    assert not _get_current_function_mode_stack()


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "item": lambda p: p[0],
    "arithmetic": lambda p: 1 + p,
    "multiplied": lambda p: torch.ones(4, 4) @ p,
    "a list": lambda p: torch._foreach_norm([p]),
    "a list of lists": lambda p: torch.cat([torch.stack([p, p]).flatten(0, 1), p]),
    "a keyword": lambda p: functional.linear(torch.ones(4), weight=p),
    "copied": copy.deepcopy,
    "printed": repr,
    "its address": lambda p: p.data_ptr(),
    "edited": lambda p: p.detach().zero_(),
    "moved": lambda p: p.to(torch.float64),
}
PEEKS: dict[str, Callable[[nn.Parameter], object]] = {
    "its gradient": lambda p: p.grad,
    "a gradient set": lambda p: setattr(p, "grad", None),
    "shape": lambda p: (p.shape, p.dtype, p.device, p.numel(), p.size(0), p.dim()),
    "frozen": lambda p: (p.requires_grad, p.requires_grad_(True)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_whatever_uses_a_parameter_waits_for_it(awaited: Awaited, use: Callable[[nn.Parameter], object]) -> None:
    use(awaited.weight)
    assert set(awaited.waited) == {"0.weight"}


@pytest.mark.parametrize("peek", PEEKS.values(), ids=PEEKS.keys())
def test_what_does_not_read_its_values_does_not_wait(awaited: Awaited, peek: Callable[[nn.Parameter], object]) -> None:
    peek(awaited.weight)
    torch.optim.SGD(awaited.model.parameters(), lr=0.1).zero_grad()
    torch.ones(3) + torch.ones(3)
    assert not awaited.waited


def test_a_layer_that_is_called_waits_for_its_own_parameters_only(awaited: Awaited) -> None:
    awaited.model[0](torch.ones(2, 4))  # type: ignore[index]
    assert set(awaited.waited) == {"0.weight", "0.bias"}
    awaited.waited.clear()
    awaited.model[1](torch.ones(2, 4))  # type: ignore[index]
    assert set(awaited.waited) == {f"1.{name}" for name, _ in awaited.model[1].named_parameters()}  # type: ignore[index]


def test_a_view_that_was_made_before_is_noticed(awaited: Awaited) -> None:
    weight = awaited.bound[0].local
    awaited.waits.end()
    kept = weight.view(-1)[5:9]
    assert awaited.waits.begin()
    kept.sum()
    assert awaited.waited == ["0.weight"]
    kept.sum()
    awaited.weight.sum()
    assert awaited.waited == ["0.weight"], "it is waited for once"
    awaited.waits.end()
    assert awaited.waits.begin()
    awaited.weight.sum()
    assert awaited.waited == ["0.weight"] * 2


def test_nothing_is_watched_any_more_once_every_parameter_has_been_used(awaited: Awaited) -> None:
    for one in awaited.model.parameters():
        assert _get_current_function_mode_stack()
        one.sum()
    torch.ones(2).sum()
    awaited.model[0](torch.ones(2, 4))  # type: ignore[index]
    assert not _get_current_function_mode_stack()


def test_a_tensor_of_torch_func_may_be_any_parameter(awaited: Awaited) -> None:
    given = dict(awaited.model.named_parameters())
    torch.func.grad(lambda named: (named["0.bias"] ** 2).sum())(given)
    assert set(awaited.waited) == set(given)


def test_nothing_waits_when_everything_is_here(awaited: Awaited) -> None:
    awaited.waits.end()
    assert not _get_current_function_mode_stack()
    awaited.model[0](torch.ones(2, 4)).sum().backward()  # type: ignore[index]
    assert not awaited.waited


def test_a_child_process_does_not_wait_for_threads_that_it_does_not_have(
    awaited: Awaited, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    awaited.model[0](torch.ones(2, 4))  # type: ignore[index]
    assert not awaited.waited


class Other(TorchFunctionMode):
    """A mode of the program's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Other, lambda: torch.device("cpu")], ids=["a mode", "a device"])
def test_modes_of_the_program_stay_as_they_are_whenever_the_wait_begins_and_ends(
    make: Callable[[], TorchFunctionMode],
) -> None:
    one = Awaited(nn.Linear(4, 4))
    with make():
        one.waits.begin()
    one.weight.sum()
    assert one.waited == ["weight"]
    with make():
        one.bias.sum()
        assert one.waited == ["weight", "bias"]
        one.waits.end()
        assert len(_get_current_function_mode_stack()) == 1
    assert not _get_current_function_mode_stack()
    with make():
        one.waits.begin()
        one.waits.end()
    one.waits.close()
    assert not _get_current_function_mode_stack()


def test_the_default_device_stays_at_the_bottom() -> None:
    one = Awaited(nn.Linear(4, 4))
    torch.set_default_device("cpu")
    try:
        one.waits.begin()
        one.weight.sum()
        assert one.waited == ["weight"]
    finally:
        torch.set_default_device(None)
    one.waits.close()
    assert not _get_current_function_mode_stack()


def test_a_watch_that_ends_inside_a_call_it_sees_is_taken_off_by_the_next_layer() -> None:
    model = nn.Linear(4, 4)
    one = Awaited(model)
    one.waits._need = lambda _: one.waits.end()
    one.waits.begin()
    model.weight.sum()
    assert len(_get_current_function_mode_stack()) == 1
    model(torch.ones(4))
    assert not _get_current_function_mode_stack()
    one.waits.close()


def test_compiled_code_is_not_watched_so_everything_is_awaited() -> None:
    model = nn.Linear(4, 4)
    one = Awaited(model)
    compiled = torch.compile(lambda given: given @ model.weight, backend="eager")
    try:
        assert one.waits.begin()
        compiled(torch.ones(2, 4))
        assert set(one.waited) == {"weight", "bias"}
        assert not one.waits.begin()
    finally:
        one.waits.close()
        torch._dynamo.reset()


@pytest.mark.filterwarnings("error")
def test_a_job_that_ends_inside_forward_raises_its_error_and_no_warning() -> None:
    one = Awaited(three_layers())

    def fail(_: object) -> None:
        raise JobEndedError(Outcome(False, reason=because("ended")))

    one.waits._need = fail
    one.waits.begin()
    with pytest.raises(JobEndedError):
        one.model(torch.ones(2, 8))
    one.waits.close()
