"""Processor seconds of a run's programs, read from outside."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lockstep.benchmark.compare.processor_watch import ProcessorWatch, descendants, used_between


@pytest.mark.parametrize(
    ("begin", "end", "used"),
    [
        (0.0, 2.0, 3.0),
        (0.5, 1.0, 0.5),  # within one pause: evenly
        (0.5, 1.5, 1.5),
        (-5.0, 9.0, 3.0),  # before the first reading and after the last one nothing is known
    ],
)
def test_a_window_is_cut_out_of_the_readings(begin: float, end: float, used: float) -> None:
    assert used_between([(0.0, 10.0), (1.0, 11.0), (2.0, 13.0)], begin, end) == pytest.approx(used)


def test_children_of_children_belong_to_it_and_others_do_not() -> None:
    assert descendants(1, [(2, 1), (3, 2), (4, 3), (5, 9), (1, 0)]) == {2, 3, 4}


def test_the_work_of_a_child_of_a_child_is_counted() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); print(flush=True); input()"
    begin = time.monotonic()
    with ProcessorWatch() as watch:
        command = [sys.executable, "-c", outer]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            child.communicate(b"\n")
    # A process is read a few times a second: of the last moments before its end little is known.
    assert 0.05 < watch.used(begin, time.monotonic()) < 3.0
