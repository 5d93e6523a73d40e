"""What steps took, counted up from the rows of a journal."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.ids import Role, TaskId, server, worker
from lockstep.protocol.core.journal import Happening, Row
from lockstep.protocol.core.parts import Part
from lockstep.runtime.trace.step_tally import BOUNDS, Histogram, StepTally


def row(at: float, happening: Happening, step: int, peer: TaskId | None = None, *, share: bool = False) -> Row:
    return (at, happening, step, 0, peer, "", share)


def test_a_worker_waits_for_the_server_that_came_last_and_computes_from_then_on() -> None:
    tally = StepTally(Role.WORKER)
    rows = [
        row(0.0, Happening.ARRIVED, 0, server(0)),
        row(2.0, Happening.SEALED, 0),
        row(2.5, Happening.ARRIVED, 1, server(0)),
        row(3.0, Happening.ARRIVED, 1, server(1)),
        row(4.0, Happening.ARRIVED, 2, server(0)),  # a bucket of the next version is there before the seal
        row(5.0, Happening.SEALED, 1),
        row(6.0, Happening.ARRIVED, 2, server(1), share=True),  # of its share: not what it waits for
        row(8.0, Happening.SEALED, 2),
    ]
    for each in rows:  # however the sampler cuts them
        tally.read([each], 0.0)
    assert tally.parts[Part.COMPUTING].seconds == pytest.approx(2.0 + 2.0 + 4.0)
    assert tally.parts[Part.WAITING].seconds == pytest.approx(1.0)
    assert tally.waited == {server(1): pytest.approx(1.0)}
    assert (tally.steps.seconds, tally.counted, tally.productive) == (6.0, 2, 6.0)


def test_a_server_collects_until_the_last_worker_has_sent_and_then_updates() -> None:
    tally = StepTally(Role.SERVER)
    rows = [
        row(1.0, Happening.ARRIVED, 4, worker(0)),
        row(3.0, Happening.ARRIVED, 4, worker(1)),
        row(3.5, Happening.PRODUCED, 5),
        row(3.6, Happening.ARRIVED, 5, worker(0)),
        row(4.0, Happening.COMMITTED, 4),
        row(5.0, Happening.COMMITTED, 4, worker(0)),  # not this server's own step
    ]
    tally.read(rows, 1.0)
    assert tally.parts[Part.COLLECTING].seconds == pytest.approx(2.0)
    assert tally.parts[Part.UPDATING].seconds == pytest.approx(0.5)
    assert tally.waited == {worker(1): pytest.approx(2.0)}


def test_a_step_that_was_held_up_is_work_for_twice_its_usual_time_at_most() -> None:
    tally = StepTally(Role.WORKER)
    tally.read([row(0.0, Happening.SEALED, 0), row(1.0, Happening.SEALED, 1), row(61.0, Happening.SEALED, 2)], 1.0)
    assert (tally.steps.seconds, tally.productive) == (61.0, 3.0)


def test_a_step_that_is_missing_in_between_is_not_counted() -> None:
    tally = StepTally(Role.WORKER)
    tally.read([row(0.0, Happening.SEALED, 0), row(9.0, Happening.SEALED, 7)], 1.0)
    assert tally.counted == 0


def test_steps_without_an_end_take_no_memory() -> None:
    tally = StepTally(Role.SERVER)
    tally.read([row(float(step), Happening.ARRIVED, step, worker(0)) for step in range(10_000)], 1.0)
    assert len(tally._first) == len(tally._last) == 64


def test_durations_are_counted_up_to_each_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 1e9):
        histogram.add(seconds)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-1] == 1
