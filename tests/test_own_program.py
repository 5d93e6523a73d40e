"""``bench/own_program.py``: what its numbers mean."""

from __future__ import annotations

import pytest

from own_program import Entrant, Run, parse, ratios, table

MEMORY = {"host": 3 << 20, "gpu_used": 0, "gpu_allocated": 0, "gpu_reserved": 0}


def test_ratios_are_of_speed_and_within_a_round() -> None:
    ours = [Run(1, 10.0), Run(3, 40.0), Run(4, failure="lost")]
    ddp = [Run(1, 20.0), Run(2, 99.0), Run(3, 20.0), Run(4, 20.0)]
    assert ratios(ours, ddp) == [2.0, 0.5]


def test_a_row_without_numbers_is_still_a_row() -> None:
    runs = {"ddp": [Run(1, 20.0, 15.0, memory=MEMORY)], "ranks": [Run(1, failure="lost")], "server": []}
    lines = table(runs, "ddp", gpu=False)
    assert lines[2] == "| ddp | 20.00 | 1.000 | 15.00 | 1 | 3 | 1.00 |"
    assert "| ranks | failed |" in lines[3]
    assert "| server | not run |" in lines[4]


def test_another_row_is_one_that_is_known_with_more_flags() -> None:
    asked, entrants = parse(["gpt2", "--only=ddp", "--also=16bits=server --join=wire_dtype=bfloat16"])
    assert asked.workers == 2
    assert [entrant.name for entrant in entrants] == ["ddp", "16bits"]
    assert entrants[1] == Entrant("16bits", ("--system=lockstep-servers", "--join=wire_dtype=bfloat16"), servers=1)
    with pytest.raises(SystemExit):
        parse(["gpt2", "--only=horovod"])
