"""Stacks of real threads: whose code they are in, and where a loop is."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.waiting import wait_until
from lockstep.drill_stubs import compiler_that_takes_long
from lockstep.protocol.core.activity import Code
from lockstep.runtime.processes import uses_device
from lockstep.runtime.watch.stacks import Dwelling, frame_of, frames_of, place_in_program, whose_code

PROGRAM = """
def helper(steps):
    return sum(range(100))

def endless(stop, steps):
    while not stop.is_set():
        steps.append(helper(steps))
        if len(steps) > 100:
            steps.clear()

def waits(stop, steps):
    steps.append(1)
    stop.wait(30.0)
"""


@contextmanager
def running(tmp_path: Path, function: str) -> Iterator[int]:
    """A thread of a user's program, which runs this function until the block ends; its ident."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    program = types.ModuleType("train")
    exec(compile(PROGRAM, str(file), "exec"), program.__dict__)
    stop, steps = threading.Event(), list[int]()
    target: Callable[..., None] = getattr(program, function)
    thread = threading.Thread(target=target, args=(stop, steps))
    thread.start()
    try:
        assert wait_until(lambda: bool(steps), 5.0, "its first step")
        yield thread.ident or 0
    finally:
        stop.set()
        thread.join(10.0)


def test_stacks_seconds_apart_name_the_function_that_loops_and_its_lines(tmp_path: Path) -> None:
    dwelling = Dwelling()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with running(tmp_path, "endless") as ident:
            looks = iter(range(100_000))

            def seen_on_two_lines() -> bool:
                dwelling.look(ident, 0.0, float(next(looks)))
                return "train.py:6-" in dwelling.place

            assert wait_until(seen_on_two_lines, 20.0, "two lines of the loop")
    finally:
        sys.setswitchinterval(usual)
    assert dwelling.place.startswith("endless (")
    assert dwelling.seconds >= 1.0


def test_what_begins_anew_forgets_where_the_thread_was_before(tmp_path: Path) -> None:
    dwelling = Dwelling()
    dwelling.look(threading.get_ident(), 1.0, 1.5)
    dwelling.look(threading.get_ident(), 1.0, 4.0)
    assert dwelling.seconds == 2.5
    with running(tmp_path, "waits") as ident:
        dwelling.look(ident, 5.0, 6.0)
        assert dwelling.seconds == 0.0
        assert dwelling.place.startswith("waits (")
        assert not dwelling.innermost, "it ends in a library: the wait of an event"


def test_the_place_is_the_line_of_the_program_and_not_of_the_library_that_it_waits_in(tmp_path: Path) -> None:
    with running(tmp_path, "waits") as ident:
        assert wait_until(lambda: "train.py:13)" in place_in_program(ident), 5.0, "the wait")
        assert "threading.py" in frames_of(ident)[0]


def own_frames() -> list[str]:
    """The stack of the caller, without the frames that take it."""
    frames = frames_of(threading.get_ident(), None)
    return frames[1 + next(place for place, line in enumerate(frames) if line.startswith("own_frames (")) :]


def test_a_compiler_is_known_while_it_compiles_and_not_when_its_code_runs() -> None:
    seen: dict[str, Code] = {}

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        seen["compiling"] = whose_code(own_frames())

        def run(*inputs: Any) -> Any:
            seen["running"] = whose_code(own_frames())
            return graph.forward(*inputs)

        return run

    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x + 1, backend=backend)
    assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert seen == {"compiling": Code.COMPILER, "running": Code.USER}


def test_a_drill_s_compiler_is_taken_for_one() -> None:
    thread = threading.Thread(target=compiler_that_takes_long, args=(1.0,))
    thread.start()
    assert wait_until(lambda: whose_code(frames_of(thread.ident, None)) is Code.COMPILER, 5.0, "the compiler")
    thread.join(10.0)


@pytest.mark.parametrize(("on_device", "where"), [(True, Code.DEVICE), (False, Code.USER)])
def test_where_no_device_is_used_nothing_is_a_device_call(on_device: bool, where: Code) -> None:
    frames = ["_engine_run_backward (torch/autograd/graph.py:9)", "step (/home/me/train.py:3)"]
    assert whose_code(frames, on_device=on_device) is where


def test_a_process_that_has_opened_no_gpu_uses_none() -> None:
    assert not uses_device(1 << 30), "there is no such process"


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_interpreter_looks_at_its_threads(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to Python 3.11 the process would lock up now and then."""
    seen: list[bool] = []
    real = sys._current_frames

    def looked() -> dict[int, types.FrameType]:
        seen.append(gc.isenabled())
        return real()

    monkeypatch.setattr(sys, "_current_frames", looked)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        frame = frame_of(threading.get_ident())
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
    assert frame is not None
    assert seen == [False]
