"""Refused callers are counted and said in one place, at a bounded rate, with bounded memory."""

from __future__ import annotations

import threading

import pytest

from helpers.waiting import wait_until
from lockstep.security.proof import Refusal
from lockstep.security.refusals import EVERY_SECONDS, MOST_ADDRESSES, Entrance, RefusalLog, RefusalNotice


class Said:
    """A log whose lines are due when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        monkeypatch.setattr(RefusalLog, "_wake", lambda _: None)
        self.log = RefusalLog(self.lines.append, lambda: self.now)

    def refuse(self, caller: str, refusal: Refusal = Refusal.OTHER_KEY, entrance: Entrance = Entrance.TASK) -> None:
        self.log.note(entrance, "10.0.0.1:4700", caller, refusal)
        self.log.say_due()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(monkeypatch)


def test_a_refused_caller_is_said_with_entrance_address_and_reason(said: Said) -> None:
    said.refuse("10.0.0.9")
    (line,) = said.lines
    assert line.startswith("refused a caller at the task's port (10.0.0.1:4700): 10.0.0.9: ")
    assert "does not know this job's key" in line


def test_a_thousand_refusals_are_one_line_and_later_a_number(said: Said) -> None:
    for number in range(1000):
        said.refuse(f"10.0.0.{number % 7}")
    assert len(said.lines) == 1
    said.now += EVERY_SECONDS - 0.1
    said.log.say_due()
    assert len(said.lines) == 1
    said.now += 0.1
    assert said.log.seconds_to_next() == 0.0
    said.log.say_due()
    start = "refused 999 callers at the task's port (10.0.0.1:4700), from 7 addresses; the last, 10.0.0.5: "
    assert said.lines[1].startswith(start)
    assert said.log.seconds_to_next() is None


def test_an_hour_of_refusals_is_at_most_two_lines_per_minute_and_entrance(said: Said) -> None:
    for _ in range(3600):
        for entrance in (Entrance.TASK, Entrance.DOOR):
            said.refuse("10.0.0.9", entrance=entrance)
        said.now += 1
    assert len(said.lines) == 2 * 3600 / EVERY_SECONDS


def test_a_flood_at_one_entrance_does_not_hide_another(said: Said) -> None:
    for _ in range(100):
        said.refuse("10.0.0.9")
    said.refuse("10.0.0.8", Refusal.MALFORMED, Entrance.TENSORS)
    assert [line.partition(":")[0] for line in said.lines] == [
        "refused a caller at the task's port (10.0.0.1",
        "refused a caller at the port for tensors (10.0.0.1",
    ]


def test_more_addresses_than_are_remembered_are_said_as_that_many_or_more(said: Said) -> None:
    for number in range(10 * MOST_ADDRESSES):
        said.refuse(f"10.0.{number // 256}.{number % 256}")
    assert all(len(one.addresses) <= MOST_ADDRESSES for one in said.log._unsaid.values())
    said.now += EVERY_SECONDS
    said.log.say_due()
    assert f"from {MOST_ADDRESSES} or more addresses" in said.lines[1]


def test_those_that_only_hung_up_are_not_worth_a_line(said: Said) -> None:
    said.refuse("10.0.0.9", Refusal.CLOSED)
    assert said.lines == []
    assert said.log.summary() is None


def test_every_line_is_also_a_value_until_nobody_wants_it(said: Said) -> None:
    notices: list[RefusalNotice] = []
    end = said.log.subscribe(notices.append)
    said.refuse("10.0.0.9", Refusal.LATE)
    end()
    said.now += EVERY_SECONDS
    said.refuse("10.0.0.9", Refusal.LATE)
    assert notices == [RefusalNotice(Entrance.TASK, "10.0.0.1:4700", "10.0.0.9", Refusal.LATE, 1, 1)]


def test_the_summary_has_all_of_them_and_the_last(said: Said) -> None:
    said.refuse("10.0.0.9")
    said.refuse("10.0.0.8", Refusal.LATE, Entrance.DOOR)
    said.now += 5
    last = {"entrance": "the door of shared memory", "caller": "10.0.0.8", "why": "late", "ago": 5.0}
    assert said.log.summary() == {"callers": 2, "last": last}


def test_whoever_refuses_does_not_wait_for_the_line_to_be_written() -> None:
    read, lines = threading.Event(), list[str]()

    def say(line: str) -> None:
        read.wait(10)
        lines.append(line)

    log = RefusalLog(say)
    for entrance in Entrance:
        log.note(entrance, "", "10.0.0.9", Refusal.LATE)
    assert lines == []
    read.set()
    wait_until(lambda: len(lines) == len(Entrance), 10.0, "all lines")
    wait_until(lambda: log._thread is None, 10.0, "the end of the thread")
