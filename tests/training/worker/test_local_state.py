"""A worker's state beside the parameters is that of its step, whatever is computed before it is read."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.host_memory import HostMemory
from lockstep.training.worker.local_state import MOST_BYTES, StateDoesNotFitError, WorkerState
from lockstep.training.worker.loss_scale import LossScale
from lockstep.training.worker.replica import Replica, Trained

CPU = torch.device("cpu")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=on_a_gpu)]


def normalised(device: torch.device = CPU) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4)).to(
        device
    )


def state_of(*models: nn.Module, device: torch.device = CPU) -> WorkerState:
    return WorkerState(models, [device], LossScale())


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def compute(model: nn.Module, device: torch.device = CPU) -> Tensor:
    output: Tensor = model(torch.randn(8, 6).to(device))
    return output


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_computed_after_the_state_was_asked_for_is_not_in_it(device: torch.device) -> None:
    model = normalised(device)
    state = state_of(model, device=device)
    compute(model, device)
    taken = state.begin_taking()
    expected = buffers_of(model)
    first = compute(model, device)
    compute(model, device)
    state.put(taken())
    assert all(torch.equal(one, other) for one, other in zip(expected, model.buffers(), strict=True))
    assert torch.equal(compute(model, device), first)  # the random numbers too are those of that moment


def test_a_state_is_read_later_than_the_next_one_is_taken() -> None:
    model = normalised()
    state = state_of(model)
    takings = []
    expected = []
    for _ in range(3):
        compute(model)
        takings.append(state.begin_taking())
        expected.append(buffers_of(model))
    for taken, buffers in zip(takings, expected, strict=True):
        state.put(taken())
        assert all(torch.equal(one, other) for one, other in zip(buffers, model.buffers(), strict=True))


def test_the_states_of_several_replicas_stay_apart() -> None:
    one, other = normalised(), normalised()
    compute(one)
    state = state_of(one, other)
    packed = state.take()
    expected = [*buffers_of(one), *buffers_of(other)]
    compute(other)
    state.put(packed)
    assert all(torch.equal(a, b) for a, b in zip(expected, [*one.buffers(), *other.buffers()], strict=True))


def test_a_model_of_another_shape_does_not_take_the_state() -> None:
    packed = state_of(normalised()).take()
    with pytest.raises(StateDoesNotFitError, match="belongs to another model"):
        state_of(nn.BatchNorm1d(5)).put(packed)


def test_a_model_without_buffers_and_random_numbers_is_packed_once() -> None:
    state = state_of(nn.Linear(3, 3))
    first = state.take()
    assert state.take() is first
    torch.rand(1)
    assert state.take() != first


def test_too_large_a_state_is_refused_where_it_is_asked_for() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(MOST_BYTES // 4 + 1))
    with pytest.raises(StateDoesNotFitError, match=r"has 8\.0 MiB of buffers"):
        state_of(model).begin_taking()


def test_states_that_a_deputy_holds_share_one_message() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros((5 << 20) // 4))
    two, three = (WorkerState([model], [], LossScale(), held_of=workers) for workers in (2, 3))
    two.take()
    with pytest.raises(
        StateDoesNotFitError, match=r"at most 4\.7 MiB per step; with --server_replicas=1 .* leave it out"
    ):
        three.take()


class LateMemory(HostMemory):
    """Hands everything on from a thread of its own, in order, as the memory of a GPU does."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def filled(self, step: int, bucket: int, *, in_full: bool = False) -> None:
        hand_on = super().filled
        self._jobs.put(lambda: hand_on(step, bucket, in_full=in_full))

    def after_filled(self, action: Callable[[], None]) -> None:
        self._jobs.put(action)

    def in_order(self, action: Callable[[], None]) -> None:
        self._jobs.put(action)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(10)
        super().close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


STEPS = 6
RATES = (GroupRates(("lr",), (0.1,)),)


def test_the_next_step_begins_while_the_state_of_the_last_one_is_still_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.training.worker.binding.HostMemory", LateMemory)
    begun = [threading.Event() for _ in range(STEPS)]
    early: list[bool] = []

    def train(node: WorkerNode) -> None:
        model = nn.Linear(6, 4)
        trained = [Trained(name, parameter, 0) for name, parameter in model.named_parameters()]
        at = [0]

        def taken() -> Callable[[], bytes]:
            step = at[0]

            def pack() -> bytes:
                # In the first two steps of a life the next version is asked for with the seal, so it cannot be earlier.
                if 1 < step < STEPS - 1:
                    early.append(begun[step + 1].wait(20))
                return step.to_bytes(4, "little")

            return pack

        node.wait_until_member()
        entry = OptimizerEntry("SGD", json.dumps({"lr": 0.1}))
        replica = Replica(node, trained, (entry,), 4096, own_copy=False, local_state=taken)
        replica.start()
        for step in range(STEPS):
            at[0] = step
            replica.begin(step, RATES)
            begun[step].set()
            model(torch.ones(2, 6)).sum().backward()
            replica.end()
        replica.close()
        node.finish(STEPS)

    rules = RecoveryRules(on_worker_loss=LossPolicy.WAIT)
    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, recovery=rules) as cluster:
        cluster.run(train)
    assert early == [True] * (STEPS - 3)
