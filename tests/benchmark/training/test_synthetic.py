"""Made-up pictures are the same for the same worker of the same seed, and for nobody else."""

from __future__ import annotations

import pytest
import torch

from lockstep.benchmark.training.synthetic import SyntheticBatch, synthetic_batch, synthetic_generator


def batch(seed: int = 1, worker: int = 0, replica: int = 0, size: int = 8) -> SyntheticBatch:
    return synthetic_batch(synthetic_generator(seed, worker, replica), batch_size=size, image_size=32, num_classes=11)


def test_the_same_worker_draws_the_same_batch_in_every_run() -> None:
    first, again = batch(), batch()
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)


@pytest.mark.parametrize("other", [{"seed": 2}, {"worker": 1}, {"replica": 1}])
def test_another_seed_worker_or_replica_draws_another_batch(other: dict[str, int]) -> None:
    assert not torch.equal(batch().images, batch(**other).images)


def test_seeds_that_differ_only_in_high_bits_draw_different_batches() -> None:
    assert not torch.equal(batch(seed=1).images, batch(seed=1 + 2**40).images)


def test_drawing_leaves_the_weights_generator_alone() -> None:
    before = torch.random.get_rng_state()
    batch()
    assert torch.equal(before, torch.random.get_rng_state())


def test_pixels_are_those_of_a_photograph_scaled_to_one() -> None:
    images = batch(size=64).images
    assert images.shape == (64, 3, 32, 32)
    assert images.dtype == torch.float32
    pixels = (images + 1.0) * 127.5
    assert pixels.min() >= 7.0 - 1e-3
    assert pixels.max() <= 247.0 + 1e-3
    assert pixels.mean().item() == pytest.approx(127.0, abs=1.0)
    assert pixels.std().item() == pytest.approx(60.0 * 0.8796, rel=0.02)


def test_labels_are_uniform_over_all_classes_but_the_last() -> None:
    labels = batch(size=5000).labels
    assert labels.dtype == torch.int64
    counts = torch.bincount(labels, minlength=11)
    assert counts[10] == 0
    assert counts[:10].min() > 400
    assert counts[:10].max() < 600


def test_layout_and_type_are_as_asked() -> None:
    made = synthetic_batch(
        synthetic_generator(1, 0),
        batch_size=2,
        image_size=8,
        num_classes=2,
        input_channels=1,
        dtype=torch.bfloat16,
    )
    assert made.images.shape == (2, 1, 8, 8)
    assert made.images.dtype == torch.bfloat16
    assert made.labels.tolist() == [0, 0]
    channels_last = synthetic_batch(
        synthetic_generator(1, 0),
        batch_size=2,
        image_size=8,
        num_classes=2,
        memory_format=torch.channels_last,
    )
    assert channels_last.images.is_contiguous(memory_format=torch.channels_last)
