"""What a comparison tells the programs that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import BadInput
from lockstep.runtime.compared import (
    COMPARE_VARIABLE,
    ComparedRun,
    Shape,
    StepParts,
    compared_run,
    read_parts,
    two_ports,
    write_parts,
)
from lockstep.transports.control.ports import PortRange, PortsUsedUp, ReservedPort


def test_a_run_is_read_as_it_was_written() -> None:
    run = ComparedRun(shape=Shape.SERVERS, servers=2, warm_up=3, steps=4, folder=Path("/tmp/a, b"))
    assert compared_run({COMPARE_VARIABLE: run.variable()}) == run
    assert compared_run({}) is None


@pytest.mark.parametrize("text", ["", "ddp", "[]", '{"shape": "ddp"}', '{"shape": 1, "servers": "x"}'])
def test_a_variable_of_someone_else_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="unset it"):
        compared_run({COMPARE_VARIABLE: text})


def test_times_are_read_as_they_were_written(tmp_path: Path) -> None:
    parts = StepParts(steps=3, step=1.0, forward=0.25, backward=0.25, averaging=0.125, optimizer=0.125)
    write_parts(tmp_path / "x", parts)
    assert read_parts(tmp_path / "x") == parts
    assert parts.rest == 0.25
    (tmp_path / "x").write_text("{}")
    with pytest.raises(ValueError):
        read_parts(tmp_path / "x")


def test_both_ports_are_held() -> None:
    with two_ports() as port:
        for held in (port, port + 1):
            with pytest.raises(PortsUsedUp):
                ReservedPort("127.0.0.1", PortRange(held, held))
