"""The model of the bytes: torn reads and overwritten buffers are seen."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.ids import server, worker
from lockstep.sim.memory import Cell, GradientTag, SimulatedMemory
from lockstep.sim.violation import Violation

OLD = GradientTag(worker(0), 1, 0, 0, 0)
NEW = GradientTag(worker(0), 1, 1, 0, 0)


def filled(tag: GradientTag) -> Cell:
    cell = Cell(("gradient", worker(0), 0, 0, None))
    cell.write(0, tag)
    cell.write(1, tag)
    return cell


def test_a_buffer_is_whole_when_both_halves_are_of_the_same_origin() -> None:
    cell = filled(OLD)
    assert cell.whole() == OLD
    cell.write(0, NEW)
    assert cell.whole() is None
    cell.write(1, NEW)
    assert cell.whole() == NEW


def test_a_torn_read_is_a_violation_that_names_both_halves() -> None:
    cell = filled(OLD)
    cell.write(0, NEW)
    with pytest.raises(
        Violation, match=r"ps 0 reads gradient bucket 0 of worker 0: expected .*step=1.*, found .*step=1.* and .*step=0"
    ):
        cell.expect(NEW, "ps 0")


def test_what_somebody_reads_may_be_written_again_but_not_changed() -> None:
    cell = filled(OLD)
    cell.readers = 1
    cell.write(0, OLD)
    with pytest.raises(
        Violation, match=r"gradient bucket 0 of worker 0 is overwritten with .*step=1.* while .*step=0.* is being read"
    ):
        cell.write(0, NEW)


def test_each_pair_of_lives_has_an_inbox_of_its_own() -> None:
    memory = SimulatedMemory()
    inbox = memory.inbox(server(0), worker(0), 1, 0)
    assert memory.inbox(server(0), worker(0), 1, 0) is inbox
    others = [
        memory.inbox(server(0), worker(0), 2, 0),
        memory.inbox(server(0), worker(1), 1, 0),
        memory.inbox(server(1), worker(0), 1, 0),
        memory.inbox(server(0), worker(0), 1, 1),
        memory.gradients(worker(0), 0),
        memory.parameters(worker(0), 0),
        memory.slot(server(0), 0, 0),
        memory.slot(server(0), 0, 1),
    ]
    assert len({cell.name for cell in [inbox, *others]}) == 9
