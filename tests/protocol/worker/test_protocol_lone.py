"""The machine of a process that trains alone."""

from __future__ import annotations

import pytest

from helpers.reasons import because
from lockstep.protocol.core.effects import JobEnded
from lockstep.protocol.core.events import Broken, Finished, Sealed, SignalCame, StepBegun
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.worker.lone_machine import LoneMachine


def test_it_waits_for_its_own_step() -> None:
    machine = LoneMachine(worker(0), 60.0, Journal(), 0.0)
    assert machine.waits() == []
    machine.handle(StepBegun(4, ()), 10.0)
    (wait,) = machine.waits()
    assert (wait.on, wait.since, wait.step, wait.deadline) == (worker(0), 10.0, 4, 70.0)
    machine.handle(Sealed(4, (), ()), 12.0)
    assert machine.waits() == []
    machine.handle(StepBegun(5, ()), 13.0)
    machine.handle(Finished(5), 14.0)
    assert machine.waits() == []


def test_a_break_ends_it_once() -> None:
    machine = LoneMachine(worker(0), 60.0, Journal(), 0.0)
    machine.handle(StepBegun(4, ()), 10.0)
    broken = Broken(worker(0), 4, because("no luck"))
    assert machine.handle(broken, 13.0) == [JobEnded(False, str(worker(0)), 4, because("no luck"))]
    assert machine.handle(broken, 14.0) == []
    assert machine.waits() == []


@pytest.mark.parametrize("departure", list(Departure))
def test_a_signal_ends_it(departure: Departure) -> None:
    machine = LoneMachine(worker(0), 60.0, Journal(), 0.0)
    (ended,) = machine.handle(SignalCame(departure), 1.0)
    assert isinstance(ended, JobEnded)
    assert (ended.culprit, ended.departure) == (str(worker(0)), departure)
