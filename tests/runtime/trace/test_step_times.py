"""Where the time of a step goes, from the journals of a synthetic step."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.ids import Role, server, worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.parts import Part
from lockstep.runtime.trace.spans import parts_of_a_step, spans_of
from lockstep.runtime.trace.step_times import (
    computing_and_waiting,
    server_moments,
    step_shares,
    worker_moments,
)

PERIOD = 20.0


def worker_journal(sealed_after: float, next_after: float) -> Journal:
    """Three steps of 20 s: version here at 0, backward ends, next version at ``next_after``."""
    journal = Journal()
    for step in range(4):
        begin = step * PERIOD
        journal.record(begin - 0.5, Happening.ARRIVED, step, 0, server(0))
        journal.record(begin, Happening.ARRIVED, step, 1, server(0))
        journal.record(begin + 1, Happening.PRODUCED, step, 0, server(0))
        journal.record(begin + sealed_after, Happening.SEALED, step)
    assert next_after == PERIOD
    return journal


def server_journal(last_arrival: float, last_update: float) -> Journal:
    journal = Journal()
    for step in range(4):
        begin = step * PERIOD
        for bucket, at in ((0, 2.0), (1, last_arrival)):
            journal.record(begin + at, Happening.ARRIVED, step, bucket, worker(0))
        journal.record(begin + last_update - 1, Happening.PRODUCED, step + 1, 0)
        journal.record(begin + last_update, Happening.PRODUCED, step + 1, 1)
    return journal


def test_the_parts_of_a_step_add_up_to_the_step() -> None:
    fast, slow = worker_moments(worker_journal(6.0, PERIOD)), worker_moments(worker_journal(10.0, PERIOD))
    shares = step_shares([fast, slow], [server_moments(server_journal(13.0, 18.0))])
    assert shares is not None
    assert shares.steps == 3
    assert shares.computing == pytest.approx((6.0 + 10.0) / 2)
    assert shares.others == pytest.approx((4.0 + 0.0) / 2)
    assert (shares.gradients, shares.update, shares.parameters) == pytest.approx((3.0, 5.0, 2.0))
    assert shares.computing + shares.exposed == pytest.approx(PERIOD)


def test_what_arrives_under_the_next_forward_is_not_waiting() -> None:
    """The last bucket comes 14 s after backward has ended, but the thread waited for only 3 s of them."""
    hidden = worker_moments(worker_journal(6.0, PERIOD), {1: 3.0, 2: 3.0, 3: 3.0})
    assert computing_and_waiting(hidden) == pytest.approx((17.0 - 11.0 / 3, 3.0))
    shares = step_shares([{s: m for s, m in hidden.items() if s}], [server_moments(server_journal(13.0, 18.0))])
    assert shares is not None
    assert (shares.computing, shares.exposed) == pytest.approx((17.0, 3.0))


def test_what_was_over_before_backward_ended_is_not_exposed() -> None:
    alone = worker_moments(worker_journal(19.0, PERIOD))
    shares = step_shares([alone], [server_moments(server_journal(13.0, 18.0))])
    assert shares is not None
    assert (shares.others, shares.gradients, shares.update, shares.parameters) == pytest.approx((0, 0, 0, 1.0))


def test_one_worker_knows_how_long_it_computes_and_waits() -> None:
    assert computing_and_waiting(worker_moments(worker_journal(6.0, PERIOD))) == pytest.approx((6.0, 14.0))
    assert computing_and_waiting({}) == (0.0, 0.0)


def test_journals_without_a_common_step_give_nothing() -> None:
    assert step_shares([{1: (0.0, 1.0)}], [{5: (0.0, 1.0)}]) is None
    assert step_shares([], []) is None


def test_each_piece_of_the_timeline_names_its_part_as_a_value() -> None:
    of_worker = list(worker_journal(6.0, PERIOD)), Role.WORKER
    of_server = list(server_journal(13.0, 18.0)), Role.SERVER
    assert {span["part"] for span in spans_of(*of_worker, now=100.0)} == {Part.COMPUTING, Part.WAITING}
    assert {span["part"] for span in spans_of(*of_server, now=100.0)} == {Part.COLLECTING, Part.UPDATING}
    assert spans_of(*of_worker, now=100.0)[0] == {
        "part": "computing",
        "what": "computing, step 0",
        "begin": 100.0,
        "end": 94.0,
    }
    assert parts_of_a_step(*of_worker) == {Part.COMPUTING: 6.0, Part.WAITING: 14.0}
