"""What a server does with names, settings and bytes that other tasks send: it takes those it knows, no others."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import PlanError, make_plan
from lockstep.training.server.named_optimizer import ELEMENTWISE, make_optimizer, optimizer_options
from lockstep.training.server.rates import numbers_of, set_numbers
from lockstep.training.server.shard_store import PUT_STATE, STATE_CHUNK, STATE_HEADER, TorchShardStore

KIBIBYTE = ParameterEntry("weight", 256, "float32", 0)


def store_of(entry: OptimizerEntry, parameter: ParameterEntry = KIBIBYTE) -> TorchShardStore:
    plan = make_plan((parameter,), 1)
    store = TorchShardStore()
    slots = [memoryview(bytearray(plan.shard_room(0))) for _ in range(2)]
    store.prepare(Layout(plan.hash, plan.bucket_bytes, plan.parameters, (entry,)), plan, 0, slots)
    return store


@pytest.mark.parametrize("kind", ["Optimizer", "LBFGS", "lr_scheduler", "__class__", "swa_utils", "sgd", "", "no\x1b"])
def test_only_optimizers_of_the_list_are_made(kind: str) -> None:
    """It was ``getattr(torch.optim, kind)`` with whatever a peer had written."""
    with pytest.raises(ValueError, match="servers do not run"):
        make_optimizer(OptimizerEntry(kind, "{}"), torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_every_optimizer_of_the_list_is_made(kind: str) -> None:
    made = make_optimizer(OptimizerEntry(kind, '{"lr": 0.5}'), torch.nn.Parameter(torch.zeros(1)))
    assert type(made).__name__ == kind


@pytest.mark.parametrize(
    "options", ["[]", "3", '{"lr": "0.1"}', '{"lr": {"a": 1}}', '{"betas": ["a"]}', '{"lr": NaN}', "{", "[" * 100_000]
)
def test_settings_are_plain_numbers_and_nothing_else(options: str) -> None:
    with pytest.raises(ValueError):
        optimizer_options(OptimizerEntry("SGD", options))


def test_a_state_has_no_more_room_than_its_bucket_can_need() -> None:
    """A bucket of 1 KiB took 900 MiB of a worker's bytes."""
    store = store_of(OptimizerEntry("Adam", '{"lr": 0.1}'))
    total = 900 << 20
    with pytest.raises(ValueError, match="are no optimizer state of bucket 0"):
        store.answer(PUT_STATE, STATE_HEADER.pack(0, 0, total) + bytes(STATE_CHUNK))
    assert not store._incoming


@pytest.mark.parametrize("elements", [1, 256, 100_000])
def test_every_real_state_has_room(elements: int) -> None:
    entry = ParameterEntry("weight", elements, "float64", 0)
    store = store_of(OptimizerEntry("Adam", '{"lr": 0.1, "amsgrad": true}'), entry)
    tensors = {f"0/{name}": torch.ones(elements, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")}
    tensors |= {"0/max_exp_avg_sq": torch.ones(elements, dtype=torch.float64), "0/step": torch.tensor(3.0)}
    data = save(tensors)
    for first in range(0, len(data), STATE_CHUNK):
        chunk = data[first : first + STATE_CHUNK]
        assert store.answer(PUT_STATE, STATE_HEADER.pack(0, first, len(data)) + chunk) == b""
    assert not store._incoming


@pytest.mark.parametrize("name", ["params", "nothing", "betas.7", "betas.-1", "betas.x", "lr.0"])
def test_rates_change_numbers_that_the_optimizer_has_and_nothing_else(name: str) -> None:
    group: dict[str, object] = {"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "nesterov": False, "foreach": None}
    before = dict(group)
    with pytest.raises(ValueError, match="the optimizer has no number"):
        set_numbers(group, GroupRates((name,), (3.0,)))
    assert group == before
    set_numbers(group, GroupRates(("lr", "betas.1", "nesterov"), (0.2, 0.5, 1.0)))
    assert (group["lr"], group["betas"], group["nesterov"]) == (0.2, (0.9, 0.5), True)


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_is_no_number_is_named_where_it_was_set(rate: float) -> None:
    with pytest.raises(ValueError, match=f"the optimizer's lr is {rate}"):
        numbers_of({"lr": rate}, frozenset(("lr",)))


def test_a_plan_of_endless_buckets_is_refused_before_it_is_made() -> None:
    with pytest.raises(PlanError, match="too many buckets"):
        make_plan((ParameterEntry("weight", 1 << 40, "float32", 0),), 1, 64)
