"""The loop of a task: which thread carries out what, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.errors import RemoteProtocolError
from lockstep.protocol.core.events import Broken, Event, Tick
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.runtime.task.loop import ASK_SECONDS, TaskLoop

SECONDS = 20.0
TASK = TaskId.parse("/job:worker/replica:0/task:0")


@dataclass(frozen=True, slots=True)
class Something:
    """Stands in for any event."""

    number: int


@dataclass
class Recorder:
    """Machines that record what they receive, and on which thread."""

    task = TASK
    step = 0
    awaited: frozenset[TaskId] = frozenset()
    deadline: float | None = None
    given: list[tuple[object, int]] = field(default_factory=list)
    on_event: Callable[[object], None] = lambda _: None
    ticked: threading.Event = field(default_factory=threading.Event)
    now_waiting: list[Wait] = field(default_factory=list)

    @property
    def role(self) -> Recorder:
        return self

    def start(self, now: float) -> list[Effect]:
        del now
        return []

    def handle(self, event: Event, now: float) -> list[Effect]:
        del now
        self.given.append((event, threading.get_ident()))
        if isinstance(event, Tick):
            self.deadline = None
            self.ticked.set()
        self.on_event(event)
        return []

    def next_deadline(self) -> float | None:
        return self.deadline

    def events(self) -> list[object]:
        return [event for event, _ in self.given]

    def waits(self) -> list[Wait]:
        return list(self.now_waiting)

    def snapshot(self) -> dict[str, object]:
        return {}

    def check(self) -> None:
        return


@pytest.fixture
def machine() -> Recorder:
    return Recorder()


@pytest.fixture
def loop(machine: Recorder) -> Iterator[TaskLoop]:
    made = TaskLoop(machine, lambda _: None)
    made.start()
    made.settle(SECONDS)
    yield made
    made.stop()


def bring(loop: TaskLoop, number: int) -> None:
    loop.do(Something(number))  # type: ignore[arg-type]


def elsewhere(action: Callable[[], None]) -> int:
    """Do something on a separate thread, as transports and stores do; returns that thread."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert thread.ident is not None
    return thread.ident


def test_where_nothing_is_under_way_the_one_who_brings_an_event_carries_it_out(
    loop: TaskLoop, machine: Recorder
) -> None:
    ident = elsewhere(lambda: bring(loop, 1))
    assert machine.given == [(Something(1), ident)]


def test_the_main_thread_which_signals_interrupt_carries_nothing_out(loop: TaskLoop, machine: Recorder) -> None:
    bring(loop, 1)
    loop.settle(SECONDS)
    assert [ident == threading.get_ident() for _, ident in machine.given] == [False]


def test_what_is_posted_is_carried_out_by_the_loops_own_thread(loop: TaskLoop, machine: Recorder) -> None:
    loop.post(Something(1))  # type: ignore[arg-type]
    loop.settle(SECONDS)
    assert [ident == threading.get_ident() for _, ident in machine.given] == [False]


def test_what_follows_from_an_event_comes_right_after_it_on_the_same_thread(loop: TaskLoop, machine: Recorder) -> None:
    def follow(event: object) -> None:
        if event == Something(1):
            loop.post(Something(4))  # type: ignore[arg-type]
            loop.then(Something(2))  # type: ignore[arg-type]
        if event == Something(2):
            loop.then(Something(3))  # type: ignore[arg-type]

    machine.on_event = follow
    ident = elsewhere(lambda: bring(loop, 1))
    loop.settle(SECONDS)
    assert machine.events() == [Something(number) for number in (1, 2, 3, 4)]
    assert [thread == ident for _, thread in machine.given] == [True, True, True, False]


def test_events_of_one_thread_keep_their_order_whichever_way_it_brings_them(loop: TaskLoop, machine: Recorder) -> None:
    def bring_in_turns() -> None:
        for number in range(0, 3000, 3):
            loop.post(Something(number))  # type: ignore[arg-type]
            bring(loop, number + 1)
            bring(loop, number + 2)

    elsewhere(bring_in_turns)
    loop.settle(SECONDS)
    assert machine.events() == [Something(number) for number in range(3000)]


def test_events_of_many_threads_are_carried_out_one_at_a_time_and_none_is_lost(
    loop: TaskLoop, machine: Recorder
) -> None:
    inside, overlaps = [0], [0]

    def watch(event: object) -> None:
        inside[0] += 1
        overlaps[0] += inside[0] != 1
        inside[0] -= 1

    machine.on_event = watch

    def bring_many(first: int) -> None:
        for number in range(first, first + 500):
            bring(loop, number)

    threads = [threading.Thread(target=bring_many, args=(first,)) for first in range(0, 4000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    loop.settle(SECONDS)
    assert overlaps == [0]
    assert sorted(event.number for event in machine.events()) == list(range(4000))  # type: ignore[attr-defined]


def test_nobody_waits_for_an_event_that_is_under_way(loop: TaskLoop, machine: Recorder) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def block_on_the_first(event: object) -> None:
        if event == Something(1):
            begun.set()
            may_end.wait(SECONDS)

    machine.on_event = block_on_the_first
    first = threading.Thread(target=lambda: bring(loop, 1))
    first.start()
    assert begun.wait(SECONDS)
    assert loop.ident == first.ident, "a report shows the stack of the thread that is in the event"
    elsewhere(lambda: bring(loop, 2))
    assert machine.events() == [Something(1)]
    may_end.set()
    first.join(SECONDS)
    loop.settle(SECONDS)
    assert machine.events() == [Something(1), Something(2)]


def test_an_event_that_an_event_brings_comes_after_it(loop: TaskLoop, machine: Recorder) -> None:
    seen_inside: list[list[object]] = []

    def bring_another(event: object) -> None:
        if event == Something(1):
            bring(loop, 2)
            seen_inside.append(machine.events())

    machine.on_event = bring_another
    elsewhere(lambda: bring(loop, 1))
    loop.settle(SECONDS)
    assert seen_inside == [[Something(1)]]
    assert machine.events() == [Something(1), Something(2)]


def test_a_deadline_that_comes_with_an_event_carried_out_elsewhere_is_kept(loop: TaskLoop, machine: Recorder) -> None:
    def set_deadline(event: object) -> None:
        if event == Something(1):
            machine.deadline = loop.clock() + 0.05

    machine.on_event = set_deadline
    elsewhere(lambda: bring(loop, 1))
    assert machine.ticked.wait(SECONDS)


def test_an_error_in_an_event_reaches_the_machines_and_not_who_brought_it(loop: TaskLoop, machine: Recorder) -> None:
    def fail(event: object) -> None:
        if event == Something(1):
            raise OSError("no such thing")

    machine.on_event = fail
    elsewhere(lambda: bring(loop, 1))
    broken = machine.events()[-1]
    assert isinstance(broken, Broken)
    assert "no such thing" in broken.reason.text


def test_nothing_is_carried_out_once_the_loop_was_stopped(loop: TaskLoop, machine: Recorder) -> None:
    loop.stop()
    elsewhere(lambda: bring(loop, 1))
    assert machine.given == []


def test_a_rule_that_a_peer_broke_is_the_peers_fault_and_not_that_of_who_found_it_out(
    loop: TaskLoop, machine: Recorder
) -> None:
    peer = TaskId.parse("/job:ps/replica:0/task:0")

    def find_out(event: object) -> None:
        if event == Something(1):
            raise RemoteProtocolError(peer, "opened step 12 while this task is in step 3")

    machine.on_event = find_out
    elsewhere(lambda: bring(loop, 1))
    broken = machine.events()[-1]
    assert isinstance(broken, Broken)
    assert broken.culprit == peer
    assert broken.reason.peer == str(TASK)
    assert not broken.reason.own_error


def test_the_books_of_a_loop_that_stands_still_can_be_read(loop: TaskLoop, machine: Recorder) -> None:
    wait = Wait(TASK, TASK, WaitKind.OWN_STEP, 3, 0.0, 1.0, "computing")
    machine.now_waiting = [wait]
    loop.settle(SECONDS)
    loop.ask(lambda: loop._publish(0.0), SECONDS)
    entered, free = threading.Event(), threading.Event()

    def stand_still() -> None:
        entered.set()
        free.wait(SECONDS)

    loop.call(stand_still)
    assert entered.wait(SECONDS)
    machine.now_waiting = []
    assert loop.ask(loop.read_books, 0.05) is None, "the loop does not come to it"
    assert loop.books.waits == (wait,)
    free.set()


def test_while_events_come_the_machines_are_seldom_asked_for_deadlines(machine: Recorder) -> None:
    now, asked = [100.0], [0]

    def next_deadline() -> float | None:
        asked[0] += 1
        return machine.deadline

    machine.next_deadline = next_deadline  # type: ignore[method-assign]
    loop = TaskLoop(machine, lambda _: None, lambda: now[0])
    loop.start()
    try:
        for number in range(50):
            loop.post(Something(number))  # type: ignore[arg-type]
            loop.settle(SECONDS)
        # No time has passed: once at the start, and once more if the thread came there before the clock was read.
        assert asked[0] <= 2
        machine.deadline, now[0] = now[0], now[0] + ASK_SECONDS
        assert machine.ticked.wait(SECONDS), "a deadline that came since is found"
    finally:
        loop.stop()
