"""A server's store on a GPU: close to what the CPU computes, exact from checkpoint to checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from helpers.one_bucket import KINDS, OneBucket, flat_of, in_one_process
from helpers.warm_gpu import warm_gpu
from lockstep.protocol.core.ids import INITIAL_STEP
from lockstep.runtime.checkpoint.tensor_file import write_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

warm_gpu()


@pytest.mark.parametrize("missing", [{}, {0: (0,), 3: (1, 2)}], ids=["all", "some twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_on_a_gpu_agrees_with_one_process(kind: str, missing: dict[int, tuple[int, ...]]) -> None:
    bucket = OneBucket(kind, device="cuda:0")
    with contextlib.closing(bucket.store):
        bucket.apply([flat_of(INITIAL_STEP, 0)])
        for step in range(5):
            bucket.apply([flat_of(step, 0), flat_of(step, 1)], missing.get(step, ()))
        for ours, theirs in zip(bucket.values(), in_one_process(kind, 5, missing), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        memory = bucket.store.memory()
        assert memory["parameters on the GPU"] >= 4 * 400_007
        assert kind == "ASGD" or memory["state of the optimizer"] >= 4 * 400_007


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_moves_between_gpu_and_cpu(tmp_path: Path, kind: str, apart: bool) -> None:
    one, same, other = OneBucket(kind, device="cuda:0"), OneBucket(kind, device="cuda:0"), OneBucket(kind)
    with contextlib.closing(one.store), contextlib.closing(same.store), contextlib.closing(other.store):
        one.apply([flat_of(INITIAL_STEP, 0)])
        for step in range(3):
            one.apply([flat_of(step, 0), flat_of(step, 1)], (0,) if apart and step == 1 else ())
        write_tensors(tmp_path / "shard", one.store.snapshot(one.version), {})
        for restored in (same, other):
            restored.version = one.version
            restored.store.restore(tmp_path, ["shard"], one.version % 2)
        for step in range(3, 6):
            for bucket in (one, same, other):
                bucket.apply([flat_of(step, 0), flat_of(step, 1)])
        for ours, twin, theirs in zip(one.values(), same.values(), other.values(), strict=True):
            assert torch.equal(ours, twin)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_in_16_bits_are_widened_on_the_gpu() -> None:
    narrow, host = (OneBucket("AdamW", device=device, wire="bfloat16") for device in ("cuda:0", "cpu"))
    with contextlib.closing(narrow.store), contextlib.closing(host.store):
        for bucket in (narrow, host):
            bucket.apply([flat_of(INITIAL_STEP, 0)])
            for step in range(3):
                bucket.apply([flat_of(step, 0), flat_of(step, 1)])
        for ours, theirs in zip(narrow.values(), host.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
