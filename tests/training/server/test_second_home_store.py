"""Both homes of a bucket make the same bits: of the mean that is handed on, and after a copy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import INITIAL_STEP, worker
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.task.store import Done
from lockstep.training.server.sgd import PIECE_BYTES
from lockstep.training.server.shard_store import TorchShardStore

ENTRIES = (ParameterEntry("weight", 304, "float32", 0), ParameterEntry("bias", 16, "float32", 0))
PLAN = make_plan(ENTRIES, 2, 4096)
RATES = (GroupRates(("lr",), (0.1,)),)
SECONDS = 60.0
GPU = pytest.param(
    "cuda:0",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
)
OPTIMIZERS = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}, "Adam": {}}


_made: list[TorchShardStore] = []


@pytest.fixture(autouse=True)
def _closed_stores() -> Iterator[None]:
    """A store on a GPU has a thread."""
    yield
    while _made:
        _made.pop().close()


class Home:
    """One server's store of both shards."""

    def __init__(self, optimizer: str, device: str = "cpu") -> None:
        entry = OptimizerEntry(optimizer, json.dumps({"lr": 0.1, **OPTIMIZERS[optimizer]}))
        layout = Layout(PLAN.hash, 4096, ENTRIES, (entry,))
        self.store = TorchShardStore(torch.device(device), stays_on_gpu=False)
        _made.append(self.store)
        for shard in range(2):
            nbytes = max(1, PLAN.shard_room(shard) + self.store.spare_bytes(PLAN))
            self.store.prepare(layout, PLAN, shard, [memoryview(bytearray(nbytes)) for _ in range(2)])

    def make(self, step: int, gradients: list[memoryview], workers: int) -> None:
        given = tuple(worker(index) for index in range(len(gradients)))
        arrivals = tuple(range(1, len(gradients) + 1))
        self.begin(Apply(step, 0, given, arrivals, workers, RATES, step % 2, (step + 1) % 2), gradients)

    def begin(self, effect: Apply, gradients: list[memoryview]) -> None:
        """Returns when it is done."""
        _wait_for(lambda done: self.store.begin(effect, gradients, done))

    def keep(self, effect: Apply, gradients: list[memoryview]) -> memoryview:
        """The same; returns the mean as it was when it was called whole."""
        mean, seen = memoryview(bytearray(PLAN.buckets[0].nbytes)), bytearray()

        def whole() -> None:
            assert not seen
            seen.extend(mean)

        _wait_for(lambda done: self.store.begin_and_keep(effect, gradients, mean, whole, done))
        assert seen == mean
        return mean

    def make_and_hand_on(self, step: int, gradients: list[memoryview]) -> memoryview:
        given = tuple(worker(index) for index in range(len(gradients)))
        return self.keep(Apply(step, 0, given, (1, 2), 2, RATES, step % 2, (step + 1) % 2, scale=0.5), gradients)


def _wait_for(begin: Callable[[Done], None]) -> None:
    failed: list[Exception | None] = []
    told = threading.Event()

    def done(error: Exception | None) -> None:
        failed.append(error)
        told.set()

    begin(done)
    assert told.wait(SECONDS)
    assert failed == [None]


def _values(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def _random(seed: int, nbytes: int = PLAN.buckets[0].nbytes) -> memoryview:
    values = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))
    return values.numpy().data.cast("B")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_homes_make_the_same_of_a_mean_and_a_copy_goes_on_like_its_home(optimizer: str, device: str) -> None:
    home, second, late = (Home(optimizer, device) for _ in range(3))
    for one in (home, second):
        one.make(INITIAL_STEP, [_random(0)], 1)
    for step in range(4):
        mean = home.make_and_hand_on(step, [_random(2 * step + 1), _random(2 * step + 2)])
        for one in (second, *([late] if step == 3 else [])):
            one.make(step, [mean], 1)
        if step == 2:
            late.store.take_in(0, 3, home.store.copy_out(0, 3))
    assert home.store.digest(0, 4) == second.store.digest(0, 4) == late.store.digest(0, 4)
    assert home.store.digest(0, 4) != home.store.digest(0, 3)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_mean_that_is_handed_on_is_the_one_that_is_applied(optimizer: str, device: str) -> None:
    home, plain = Home(optimizer, device), Home(optimizer, device)
    for one in (home, plain):
        one.make(INITIAL_STEP, [_random(0)], 1)
    gradients = [_random(1), _random(2)]
    home.make_and_hand_on(0, gradients)
    effect = Apply(0, 0, (worker(0), worker(1)), (1, 2), 2, RATES, 0, 1, scale=0.5)
    plain.begin(effect, gradients)
    assert home.store.digest(0, 1) == plain.store.digest(0, 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_mean_is_handed_on_unchanged_by_the_optimizer(optimizer: str) -> None:
    home = Home(optimizer)
    home.make(INITIAL_STEP, [_random(0)], 1)
    mean = home.make_and_hand_on(0, [_random(1), _random(2)])
    assert torch.equal(_values(mean), (_values(_random(1)) + _values(_random(2))) / 2 * 0.5)


def _large_store(plan: Plan) -> TorchShardStore:
    numbers = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    layout = Layout(plan.hash, plan.arena_bytes, plan.parameters, (OptimizerEntry("SGD", json.dumps(numbers)),))
    store = TorchShardStore(helpers=3)
    store.prepare(layout, plan, 0, [memoryview(bytearray(plan.shard_room(0))) for _ in range(2)])
    return store


def test_a_mean_in_many_pieces_is_whole_once_and_its_version_as_without_a_second_home() -> None:
    plan = make_plan((ParameterEntry("weight", 3 * PIECE_BYTES // 4 + 5, "float32", 0),), 1, 16 * PIECE_BYTES)
    mean = memoryview(bytearray(plan.buckets[0].nbytes))
    gradients = [_random(seed, mean.nbytes) for seed in (1, 2)]
    effect = Apply(0, 0, (worker(0), worker(1)), (1, 2), 2, RATES, 0, 1)
    kept, plain = (_large_store(plan) for _ in range(2))
    wholes: list[bytes] = []
    _wait_for(lambda done: kept.begin_and_keep(effect, gradients, mean, lambda: wholes.append(bytes(mean)), done))
    _wait_for(lambda done: plain.begin(effect, gradients, done))
    assert wholes == [bytes(mean)]
    assert torch.equal(_values(mean), (_values(gradients[0]) + _values(gradients[1])) / 2)
    assert kept.digest(0, 1) == plain.digest(0, 1)
    for store in (kept, plain):
        store.close()


def test_a_bucket_whose_parameters_all_lack_a_gradient_has_a_whole_mean_at_once() -> None:
    home = Home("Adam")
    home.make(INITIAL_STEP, [_random(0)], 1)
    given = (worker(0), worker(1))
    parameters = tuple(piece.parameter for piece in PLAN.buckets[0].pieces)
    home.keep(Apply(0, 0, given, (1, 2), 2, RATES, 0, 1, parameters), [_random(1), _random(2)])
    assert torch.equal(*(_values(memoryview(home.store.copy_out(0, v)[: PLAN.buckets[0].nbytes])) for v in (0, 1)))


def test_a_copy_of_another_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="are no copy of bucket 0"):
        Home("SGD").store.take_in(0, 3, b"short")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_reduces_to_the_same_bits_as_a_cpu_and_leaves_them_in_host_memory() -> None:
    gradients = [_random(1), _random(2)]
    means = [bytes(Home("SGD", device).make_and_hand_on(0, gradients)) for device in ("cpu", "cuda:0")]
    assert means[0] == means[1]
