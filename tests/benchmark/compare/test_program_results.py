"""The table of a program's shapes."""

from __future__ import annotations

from lockstep.benchmark.compare.program_results import ProgramRun, ShapeRow, program_json, program_table, speed_ratios
from lockstep.runtime.compared import Shape, StepParts


def a_step(seconds: float) -> ProgramRun:
    tenth = seconds / 10
    return ProgramRun(
        StepParts(steps=5, step=seconds, forward=2 * tenth, backward=3 * tenth, averaging=tenth, optimizer=tenth)
    )


def test_ratios_are_taken_within_a_round() -> None:
    ours = ShapeRow(Shape.RANKS, [a_step(0.1), ProgramRun(failure="lost"), a_step(0.4)])
    ddp = ShapeRow(Shape.DDP, [a_step(0.2), a_step(0.2), a_step(0.2)])
    assert speed_ratios(ours, ddp) == [2.0, 0.5]
    assert speed_ratios(ours, None) == []


def test_a_shape_that_cannot_run_is_a_row_and_no_failure() -> None:
    rows = [ShapeRow(Shape.DDP, [a_step(0.2)]), ShapeRow(Shape.SERVERS, [ProgramRun(cannot="no server")])]
    lines = program_table(rows)
    assert [cell.strip() for cell in lines[2].split("|")[2:7]] == ["200.00", "1.00", "40.00", "60.00", "20.00"]
    assert "cannot run so" in lines[3]
    assert (rows[1].trouble, rows[1].failed) == ("no server", False)


def test_json_has_every_round() -> None:
    rows = [ShapeRow(Shape.DDP, [a_step(0.2), ProgramRun(failure="lost")])]
    shape = program_json(rows, {"workers": 2})["shapes"][0]
    assert [step and step["step"] for step in shape["steps"]] == [0.2, None]
    assert shape["trouble"] == "lost"
