"""A worker in a call: what it sends, how often, and what it waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.core.calls import OUTSIDE_LOOPS
from lockstep.protocol.core.effects import CallAnswered, Send
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.events import Calling, LinkLost, LinkUp, StepBegun, Tick
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.journal import PROGRESS, Happening, Journal
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import CallComplete, CallMade, CallOpen, CallPlace
from lockstep.protocol.core.timing import CALL_SECONDS
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.phrases import wait_line
from lockstep.protocol.worker.caller_machine import (
    CALL_PHASE_TRANSITIONS,
    CallerMachine,
    CallPhase,
    CallPhaseTrigger,
)
from protocol.protocol_rigs import Rig, life

PS, W0, W1, W2 = server(0), worker(0), worker(1), worker(2)
FIRST = CallMade(CallPlace(0, OUTSIDE_LOOPS, 0), "all_reduce", "mean of a number", "loss", "train.py:31", b"1")
SECOND = replace(FIRST, place=CallPlace(1, 7, 0), name="train.py:31")
ANSWER = CallComplete(FIRST.place, (0, 1, 2), (b"1", b"2", b"3"))


class CallerRig(Rig):
    """Worker 0, linked to the coordinator."""

    def __init__(self, *, linked: bool = True) -> None:
        journal = Journal()
        self.machine = CallerMachine(W0, PS, journal)
        super().__init__(self.machine, journal)
        if linked:
            self.tell(LinkUp(PS, life(PS)))

    def waits(self) -> list[tuple[WaitKind, int]]:
        return [(wait.kind, wait.on.index) for wait in self.machine.waits()]


@pytest.mark.parametrize(("pair", "after"), CALL_PHASE_TRANSITIONS.items(), ids=lambda value: str(value))
def test_the_table_is_literal(pair: tuple[CallPhase, CallPhaseTrigger], after: CallPhase) -> None:
    assert advance(CALL_PHASE_TRANSITIONS, *pair) is after


def test_a_call_goes_to_the_coordinator_and_its_answer_to_the_program() -> None:
    rig = CallerRig()
    assert rig.tell(Calling(FIRST)) == [Send(PS, FIRST)]
    assert rig.waits() == [(WaitKind.ANSWER, 0)]
    assert rig.hear(PS, ANSWER) == [CallAnswered(ANSWER)]
    assert rig.machine.waits() == []
    assert rig.machine.next_deadline() is None
    assert rig.hear(PS, ANSWER) == []
    happenings = [record.happening for record in rig.journal]
    assert happenings == [Happening.CALL_MADE, Happening.CALL_COMPLETE]
    assert set(happenings) <= PROGRESS


def test_it_asks_who_is_missing_and_sends_its_value_only_until_it_is_there() -> None:
    rig = CallerRig()
    rig.tell(StepBegun(7, ()))
    rig.tell(Calling(FIRST))
    assert rig.machine.next_deadline() == rig.now + CALL_SECONDS
    rig.now += CALL_SECONDS
    assert rig.tell(Tick()) == [Send(PS, FIRST)]
    rig.hear(PS, CallOpen(FIRST.place, (1, 2)))
    assert rig.waits() == [(WaitKind.CALL, 1), (WaitKind.CALL, 2)]
    assert wait_line(rig.machine.waits()[0], rig.now) == (
        "worker 0 has been waiting 1.0 s for worker 1: all_reduce 'loss' (train.py:31), step 7 (it has not come)"
    )
    rig.now += CALL_SECONDS
    assert rig.tell(Tick()) == [Send(PS, replace(FIRST, data=b"", held=True))]
    rig.hear(PS, CallOpen(FIRST.place, (2,)))
    assert rig.waits() == [(WaitKind.CALL, 2)]
    assert rig.machine.snapshot()["missing"] == [str(W2)]


def test_on_a_new_link_the_whole_call_is_sent_again() -> None:
    rig = CallerRig(linked=False)
    assert rig.tell(Calling(FIRST)) == []
    assert rig.machine.next_deadline() is None
    assert rig.tell(LinkUp(PS, life(PS))) == [Send(PS, FIRST)]
    rig.hear(PS, CallOpen(FIRST.place, (1,)))
    rig.tell(LinkLost(PS, "cut"))
    assert rig.machine.next_deadline() is None
    assert rig.waits() == [(WaitKind.ANSWER, 0)]
    assert rig.tell(LinkUp(PS, life(PS))) == [Send(PS, FIRST)]


def test_what_is_not_about_this_call_or_from_another_life_changes_nothing() -> None:
    rig = CallerRig()
    rig.tell(Calling(FIRST))
    other = CallPlace(9, 9, 9)
    assert rig.hear(PS, replace(ANSWER, place=other)) == []
    assert rig.hear(PS, CallOpen(other, (1,))) == []
    assert rig.hear(PS, ANSWER, incarnation=5) == []
    assert rig.waits() == [(WaitKind.ANSWER, 0)]


def test_a_call_without_a_name_is_named_by_its_line() -> None:
    rig = CallerRig()
    rig.tell(Calling(SECOND))
    assert rig.machine.waits()[0].detail == "all_reduce (train.py:31)"


def test_calls_are_made_one_after_the_other() -> None:
    rig = CallerRig()
    rig.tell(Calling(FIRST))
    with pytest.raises(LocalProtocolError, match="while it is in another one"):
        rig.tell(Calling(SECOND))
    rig.hear(PS, ANSWER)
    with pytest.raises(LocalProtocolError, match="makes the call"):
        rig.tell(Calling(FIRST))
    assert rig.tell(Calling(SECOND)) == [Send(PS, SECOND)]
