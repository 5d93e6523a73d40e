"""While a job trains, Python's garbage collector does not look through what was there before; afterwards it does."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import nn, optim

from library.both_shapes import both_shapes, run_in
from library.same_loop import plain, small_model
from lockstep.library.job import Job
from lockstep.protocol.core.ids import ClusterShape

pytestmark = pytest.mark.timeout(120)


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@both_shapes
def test_what_was_there_before_training_is_left_alone_until_the_job_is_closed(shape: ClusterShape) -> None:
    before = gc.get_freeze_count()
    seen: list[tuple[int, bool]] = []

    def body(job: Job) -> None:
        model: nn.Module = small_model()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        job.wrap(model, optimizer)
        plain(model, job.worker, 0)
        optimizer.step()
        later = Knot()
        gone = weakref.ref(later)
        del later
        gc.collect()
        seen.append((gc.get_freeze_count(), gone() is None))

    run_in(shape, body)
    assert all(frozen > before + 10_000 and collected for frozen, collected in seen)
    assert gc.get_freeze_count() <= before
