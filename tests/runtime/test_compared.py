"""What a comparison tells the programs that it starts."""

from __future__ import annotations

import socket
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


def test_programs_that_are_told_the_two_ports_can_listen_there() -> None:
    with two_ports() as port, socket.socket() as first, socket.socket() as second:
        for listening, at in ((first, port), (second, port + 1)):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", at))
            listening.listen()
