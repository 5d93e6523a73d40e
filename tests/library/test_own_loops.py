"""Where a program is in its own loops is read without disturbing it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from library.both_shapes import both_shapes, run_in
from library.same_loop import momentum, plain, small_model
from lockstep.library.job import Job
from lockstep.library.own_loops import count_batches, loops_around, own_loops
from lockstep.protocol.core.ids import ClusterShape


def counts() -> list[int]:
    """What is found around the line that calls this."""
    return [one.iteration for one in loops_around(sys._getframe(1)) if "test_own_loops" in one.name]


def nested() -> list[list[int]]:
    """Without an assert: the one that pytest makes of it asks for the function's own variables."""

    def inner() -> list[int]:
        for k in [7]:
            for _name, (_, number) in [("b", ("c", 9))]:
                return [*counts(), k, number]
        return []

    found = []
    for i in [0, 1]:
        for j, _batch in enumerate(["x"], 5):
            found.append([*inner(), j])
        found.append([*counts(), i])
    return [*found, counts()]


def test_the_counters_of_all_loops_around_a_call_are_found_from_the_outermost_in() -> None:
    assert nested() == [[0, 5, 7, 9, 7, 9, 5], [0, 0], [1, 5, 7, 9, 7, 9, 5], [1, 1], []]


def named() -> str:
    for i in [3]:
        return f"{i} {loops_around(sys._getframe())[-1].name}"
    return ""


def test_a_loop_is_named_by_its_variable_and_line() -> None:
    assert named().startswith("3 i of the loop at ")
    assert named().endswith(f"test_own_loops.py:{named.__code__.co_firstlineno + 1}")


def test_a_loop_of_a_script_itself_is_found() -> None:
    scope: dict[str, Any] = {"counts": counts, "found": [], "__name__": "script"}
    exec(compile("for i in range(2):\n    found.append(counts())", "test_own_loops.py", "exec"), scope)
    assert scope["found"] == [[0], [1]]


def odd_names() -> list[int]:
    for _flag, _text, _part, _below in [(True, "1", 0.5, -1)]:
        return counts()
    return [1]


def test_what_is_no_counter_is_not_taken_for_one() -> None:
    assert odd_names() == []


def read_and_drop() -> list[bool]:
    dropped = []
    for i in range(2):
        held = torch.full((1,), i)
        gone = weakref.ref(held)
        counts()
        del held
        dropped.append(gone() is None)
    return dropped


def test_reading_leaves_nothing_behind() -> None:
    assert read_and_drop() == [True, True]


def test_a_function_that_asks_for_its_own_variables_is_left_alone() -> None:
    for i in [3]:
        known = locals()
        assert counts() == []
        assert known["i"] == i


def test_the_batches_of_a_loader_are_counted() -> None:
    count_batches()
    for number, _ in enumerate(DataLoader(TensorDataset(torch.zeros(6)), batch_size=2), 1):
        found = own_loops(threading.get_ident())[-1]
        assert (found.name, found.iteration) == ("batches taken from its DataLoader", number)


@both_shapes
@pytest.mark.parametrize("skips", [0, 1])
@pytest.mark.parametrize("counted", [True, False])
def test_an_iteration_left_out_of_a_loop_of_ones_own_is_told_at_once(
    shape: ClusterShape, skips: int, counted: bool
) -> None:
    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, optimizer := momentum(model))
        made = 0
        batches: Iterable[Any] = range(20) if counted else DataLoader(TensorDataset(torch.arange(20)))
        for batch in batches:
            number = batch if counted else int(batch[0])
            if number == 3 and job.worker == skips:
                continue
            plain(model, job.worker, number)
            optimizer.step()
            made += 1
            if made == 6:
                break

    said = [line for line in run_in(shape, body) if "has left out" in line]
    assert len(said) == 1
    assert said[0].startswith(f"worker {skips} has left out what worker {1 - skips} has done: in step 5 it is at ")
    assert ("test_own_loops.py:" if counted else "batches taken from its DataLoader") in said[0]
