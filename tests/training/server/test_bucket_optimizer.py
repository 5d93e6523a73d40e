"""A large bucket in parts, on several threads: the bits of one torch optimizer per parameter, whatever the cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, worker
from lockstep.protocol.core.messages import GroupRates, Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import PAGE, make_plan
from lockstep.runtime.checkpoint.tensor_file import write_tensors
from lockstep.training.server.bucket_optimizer import part_bytes
from lockstep.training.server.shard_store import TorchShardStore

ELEMENTS = (100_000, 300_000, 7)
ENTRIES = tuple(ParameterEntry(f"p{index}", count, "float32", 0) for index, count in enumerate(ELEMENTS))
PLAN = make_plan(ENTRIES, 1, 4 << 20)
LR = 0.05
KINDS: dict[str, str] = {
    "Adam": '{"lr": 0.1, "fused": true}',
    "AdamW": '{"lr": 0.1, "fused": true, "amsgrad": true}',
    "Adagrad": '{"lr": 0.1, "fused": true}',
    "NAdam": '{"lr": 0.1}',
    "RMSprop": '{"lr": 0.1, "momentum": 0.9}',
    "ASGD": '{"lr": 0.1}',
    "SGD": '{"lr": 0.1, "momentum": 0.9}',
}


class OneBucket:
    """A server whose only bucket has three parameters; two workers send the gradients."""

    def __init__(self, kind: str, helpers: int) -> None:
        assert len(PLAN.buckets) == 1
        self.store = TorchShardStore(helpers=helpers)
        layout = Layout(PLAN.hash, PLAN.bucket_bytes, ENTRIES, (OptimizerEntry(kind, KINDS[kind]),))
        self.slots = [memoryview(bytearray(PLAN.shard_room(0))) for _ in range(2)]
        self.store.prepare(layout, PLAN, 0, self.slots)
        self.version = INITIAL_STEP

    def apply(self, flats: list[torch.Tensor], without: tuple[int, ...] = ()) -> None:
        tasks = (CHIEF, worker(1))[: len(flats)]
        slots = (self.version % 2, (self.version + 1) % 2)
        rates = (GroupRates(("lr",), (LR,)),)
        effect = Apply(self.version, 0, tasks, (1,) * len(tasks), len(tasks), rates, *slots, without=without)
        failed: list[Exception | None] = []
        self.store.begin(effect, [flat.numpy().data.cast("B") for flat in flats], failed.append)
        assert failed == [None]
        self.version += 1

    def values(self) -> list[torch.Tensor]:
        flat = torch.frombuffer(self.slots[self.version % 2], dtype=torch.float32)
        return [flat[where].clone() for where in places()]


def places() -> list[slice]:
    by_parameter = sorted(PLAN.buckets[0].pieces, key=lambda piece: piece.parameter)
    return [slice(piece.offset // 4, piece.offset // 4 + piece.elements) for piece in by_parameter]


def flat_of(step: int, task: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + task)
    return torch.randn(PLAN.buckets[0].nbytes // 4, generator=generator)


def in_one_process(kind: str, steps: int, missing: dict[int, tuple[int, ...]]) -> list[torch.Tensor]:
    """torch's own optimizer on the separate parameters."""
    parameters = [
        torch.nn.Parameter(flat_of(INITIAL_STEP, 0)[where].clone(), requires_grad=False) for where in places()
    ]
    fused = "fused" in KINDS[kind]
    made = {
        "Adam": lambda: torch.optim.Adam(parameters, lr=LR, fused=fused),
        "AdamW": lambda: torch.optim.AdamW(parameters, lr=LR, fused=fused, amsgrad=True),
        "Adagrad": lambda: torch.optim.Adagrad(parameters, lr=LR, fused=fused),
        "NAdam": lambda: torch.optim.NAdam(parameters, lr=LR),
        "RMSprop": lambda: torch.optim.RMSprop(parameters, lr=LR, momentum=0.9),
        "ASGD": lambda: torch.optim.ASGD(parameters, lr=LR),
        "SGD": lambda: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
    }[kind]()
    for step in range(steps):
        mean = (flat_of(step, 0) + flat_of(step, 1)) / 2
        for index, (parameter, where) in enumerate(zip(parameters, places(), strict=True)):
            parameter.grad = None if index in missing.get(step, ()) else mean[where].clone()
        made.step()
    return [parameter.data for parameter in parameters]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("missing", [{}, {2: (1,)}, {0: (0,), 3: (1, 2)}], ids=["all", "one once", "some twice"])
@pytest.mark.parametrize("helpers", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_in_parts_has_the_bits_of_separate_parameters(
    kind: str, helpers: int, missing: dict[int, tuple[int, ...]]
) -> None:
    bucket = OneBucket(kind, helpers)
    with contextlib.closing(bucket.store):
        bucket.apply([flat_of(INITIAL_STEP, 0)])
        for step in range(5):
            bucket.apply([flat_of(step, 0), flat_of(step, 1)], missing.get(step, ()))
        for ours, theirs in zip(bucket.values(), in_one_process(kind, 5, missing), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_moves_between_buckets_with_other_cuts(tmp_path: Path, kind: str, apart: bool) -> None:
    one, other = OneBucket(kind, 0), OneBucket(kind, 3)
    with contextlib.closing(one.store), contextlib.closing(other.store):
        one.apply([flat_of(INITIAL_STEP, 0)])
        for step in range(3):
            one.apply([flat_of(step, 0), flat_of(step, 1)], (0,) if apart and step == 1 else ())
        write_tensors(tmp_path / "shard", one.store.snapshot(one.version), {})
        other.version = one.version
        other.store.restore(tmp_path, ["shard"], other.version % 2)
        assert one.store.memory()["state of the optimizer"] == pytest.approx(
            other.store.memory()["state of the optimizer"], abs=1000
        )
        for step in range(3, 6):
            for bucket in (one, other):
                bucket.apply([flat_of(step, 0), flat_of(step, 1)])
            assert all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def test_the_old_version_and_the_gradients_stay_readable() -> None:
    """Workers read the old version in the server's memory, and lend it their gradients."""
    bucket = OneBucket("Adam", 2)
    with contextlib.closing(bucket.store):
        bucket.apply([flat_of(INITIAL_STEP, 0)])
        before, gradient = bucket.values(), flat_of(0, 0)
        bucket.apply([gradient])
        bucket.version -= 1
        assert all(torch.equal(a, b) for a, b in zip(before, bucket.values(), strict=True))
        assert torch.equal(gradient, flat_of(0, 0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("nbytes", [0, 64, 1 << 20, 4 << 20, 64 << 20])
def test_parts_are_whole_pages_and_occupy_the_threads(nbytes: int, threads: int, fused: bool) -> None:
    part = part_bytes(nbytes, threads, fused=fused)
    assert part % PAGE == 0
    assert 256 << 10 <= part <= 2 << 20
    if nbytes >= threads * (256 << 10):
        assert -(-nbytes // part) >= threads
