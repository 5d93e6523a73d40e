"""A large bucket in parts, on several threads: the bits of one torch optimizer per parameter, whatever the cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.one_bucket import KINDS, OneBucket, flat_of, in_one_process
from lockstep.protocol.core.ids import INITIAL_STEP
from lockstep.protocol.core.plan import PAGE
from lockstep.runtime.checkpoint.tensor_file import write_tensors
from lockstep.training.server.bucket_optimizer import part_bytes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("missing", [{}, {2: (1,)}, {0: (0,), 3: (1, 2)}], ids=["all", "one once", "some twice"])
@pytest.mark.parametrize(("helpers", "slots"), [(0, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_in_parts_has_the_bits_of_separate_parameters(
    kind: str, helpers: int, slots: int, missing: dict[int, tuple[int, ...]]
) -> None:
    bucket = OneBucket(kind, helpers, slots=slots)
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
    assert 256 << 10 <= part <= 4 << 20
    if nbytes >= threads * (256 << 10):
        assert -(-nbytes // part) >= threads
