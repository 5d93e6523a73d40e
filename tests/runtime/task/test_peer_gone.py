"""A peer that cannot be reached from here is gone only by proof, or if most of the others cannot reach it either."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from lockstep.protocol.core.causes import Cause, Reason, link_down
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.ids import Incarnation, TaskId, server, worker
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.startup.address_finding import AddressFinding
from lockstep.runtime.task.connection import Connection, NodeSide
from lockstep.runtime.task.peers import PeerKeeper

CUT, HEARS, NONE = Word.UNREACHABLE, Word.HEARS, Word.NONE
ELSEWHERE = "192.0.2.7:2222"


def reason_for(found: Reach, others: list[Word], tasks: int) -> tuple[Cause | None, int]:
    """Why server 0's keeper takes worker 1 for gone, and how often it asked the others."""
    asked: list[TaskId] = []

    def words_about(peer: TaskId, incarnation: Incarnation) -> list[Word]:
        assert incarnation == 7
        asked.append(peer)
        return others

    node = cast(NodeSide, SimpleNamespace(task=server(0), words_about=words_about))
    keeper = PeerKeeper(node, worker(1), ELSEWHERE, dials=False, tasks=tasks)
    reason = keeper._word_of_all(AddressFinding("", answer=found), 7)
    assert keeper._word_of_all(AddressFinding("", answer=found), 7) is None, "they are not asked again at once"
    return None if reason is None else reason.cause, len(asked)


@pytest.mark.parametrize("found", [Reach.REFUSED, Reach.SILENT, Reach.NO_ROUTE])
@pytest.mark.parametrize(
    ("others", "tasks", "cause"),
    [
        ([], 2, None),
        ([HEARS], 3, None),
        ([NONE], 3, None),
        ([CUT], 3, Cause.DEAD),
        ([CUT, HEARS], 4, None),
        ([CUT, CUT], 4, Cause.DEAD),
        ([CUT, NONE, NONE], 5, None),
        ([Word.REPLACED, NONE, NONE], 5, Cause.DEAD),
        ([Word.ABSENT, NONE, NONE], 5, Cause.DEAD),
    ],
)
def test_the_others_decide(found: Reach, others: list[Word], tasks: int, cause: Cause | None) -> None:
    assert reason_for(found, others, tasks) == (cause, 1)


def test_a_peer_that_accepts_and_says_nothing_is_not_gone_and_nobody_is_asked() -> None:
    assert reason_for(Reach.MUTE, [CUT, CUT], 3) == (None, 0)


def linked_keeper(unheard: float) -> tuple[PeerKeeper, list[Reason]]:
    """A keeper whose link to incarnation 7 is up and has been silent this long, and why that link was ended."""
    ended: list[Reason] = []
    node = cast(NodeSide, SimpleNamespace(task=server(0)))
    keeper = PeerKeeper(node, worker(1), ELSEWHERE, dials=False)
    link = SimpleNamespace(up=True, was_up=True, incarnation=7, heard_at=time.monotonic() - unheard, end=ended.append)
    keeper._connection = cast(Connection, link)
    return keeper, ended


def test_the_silent_link_of_a_host_that_vanished_is_given_up() -> None:
    """Nobody closes it: no packet comes back. Its next incarnation would be refused as a second one for ever."""
    reason = link_down("it is gone")
    keeper, ended = linked_keeper(unheard=60)
    assert keeper.silent
    keeper.give_up_silent(reason)
    assert (ended, keeper.known_life) == ([reason], 7)


def test_a_link_with_heartbeats_is_not_given_up() -> None:
    keeper, ended = linked_keeper(unheard=0)
    assert not keeper.silent
    keeper.give_up_silent(link_down("somebody says so"))
    assert ended == []
