"""Threads that others depend on survive what they cannot deal with, and say so at a bounded rate."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from helpers.printing import FROZEN, Recorded, Task, received
from helpers.waiting import wait_until
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import Printed, Report
from lockstep.runtime.watch.watchdog import Watchdog, WatchSettings
from lockstep.transports.guard import SAY_EVERY, Guard
from lockstep.transports.timers import TimerThread

PATIENCE = 20.0


class Publisher(Recorded):
    """Records what the watchdog of a task prints."""

    class Folder:
        def hold(self) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.folder = self.Folder()

    def close(self) -> None: ...

    def say(self, text: str) -> None:
        self.printed.append(text)

    def say_problem(self, problem: Exception) -> None:
        self.printed.append(f"unreadable: {problem}")


def changed(change: Callable[[dict[str, Any]], None]) -> Report:
    fields = FROZEN.to_fields()
    change(fields)
    return Report(ReportKind.VERDICT, "", json.dumps(fields).encode())


def in_verdict(name: str, value: object) -> Report:
    def change(fields: dict[str, Any]) -> None:
        fields["verdict"][name] = value

    return changed(change)


BAD = {
    "a text where a number belongs": in_verdict("seconds", "soon"),
    "a list where a text belongs": in_verdict("stuck", ["x"]),
    "an object where a text belongs": in_verdict("culprit", {"a": 1}),
    "a text in the edges": changed(lambda fields: fields.update(causes=["x"])),
    "a number out of range": in_verdict("left", 1e300),
    "no JSON": Report(ReportKind.VERDICT, "", b"[" * 100_000),
    "nothing": Report(ReportKind.NOTICE, "", b""),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_watchdog_survives_a_report_that_is_not_one(bad: str) -> None:
    """The coordinator's watchdog died of a text in the place of a number, and nothing was said of any later fault."""
    task, publisher = Task(worker(2)), Publisher()
    dog = Watchdog(task, WatchSettings(tick=60.0), publisher)  # type: ignore[arg-type]  # what a tick needs is not here
    dog.start()
    try:
        dog.heard(BAD[bad])
        wait_until(lambda: publisher.printed, PATIENCE, "the bad report is named")
        assert publisher.printed[0].startswith("unreadable: ")
        dog.heard(received(FROZEN))
        dog.heard(Printed(ReportKind.VERDICT, FROZEN.verdict.culprit if FROZEN.verdict else ""))
        wait_until(lambda: len(publisher.printed) > 1, PATIENCE, "the good report is dealt with")
        assert publisher.printed[1] == "line: ps 0 has copy"
    finally:
        dog.close()


def test_a_watchdog_survives_an_error_of_its_own_and_says_so_once() -> None:
    task, publisher = Task(worker(2)), Publisher()
    # The task has nothing that a tick looks at: each one raises.
    dog = Watchdog(task, WatchSettings(tick=0.01), publisher)  # type: ignore[arg-type]
    dog.start()
    try:
        wait_until(lambda: publisher.printed, PATIENCE, "the error is named")
        done = threading.Event()
        dog._inbox.put(done.set)
        assert done.wait(PATIENCE), "the thread is gone"
        assert len(publisher.printed) == 1
        assert publisher.printed[0].startswith("the watchdog caught AttributeError")
    finally:
        dog.close()


def test_a_report_that_cannot_be_settled_does_not_keep_a_task_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(worker(2))
    task.printing.told(received(FROZEN))
    assert task.printing.pending

    def broken(*_: object) -> None:
        raise RuntimeError("the terminal is gone")

    monkeypatch.setattr(task.printing, "_ask", broken)
    with pytest.raises(RuntimeError):
        task.later(60.0)
    assert not task.printing.pending


def test_errors_are_printed_at_a_bounded_rate() -> None:
    now, said = [0.0], list[str]()
    guard = Guard("the thread", said.append, lambda: now[0])

    def fails() -> None:
        raise ValueError("\x1b[2Jfor\nged")

    for _ in range(1000):
        assert not guard.passes(fails)
    assert len(said) == 1
    assert said[0].startswith("the thread caught ValueError: ?[2Jfor ged (test_guarded_threads.py:")
    now[0] += SAY_EVERY
    guard.passes(fails)
    assert said[1].endswith("999 more since the last such line")
    assert guard.passes(lambda: None)


def test_timers_survive_an_errand_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    timers, done = TimerThread("errands"), threading.Event()
    try:
        timers.soon(lambda: [][1])
        timers.soon(done.set)
        assert done.wait(PATIENCE)
    finally:
        timers.close()
    assert "errands caught IndexError" in capsys.readouterr().err
