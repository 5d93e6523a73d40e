"""A peer that cannot be reached from here is gone only by proof, or if most of the others cannot reach it either."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from lockstep.protocol.core.causes import Cause, Reason, link_down
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.events import PeerGone
from lockstep.protocol.core.ids import Incarnation, TaskId, server, worker
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.startup.address_finding import AddressFinding
from lockstep.runtime.task.connection import Connection, NodeSide
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.transports.control.monitor_query import MonitorAnswer
from lockstep.transports.control.tcp_probe import Probe

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


def silent_server(
    others: list[Word], found: Reach, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[object], list[Reason]]:
    """What worker 0's keeper of a server with a second home says, and why it ends the link, when nothing is heard."""
    posted: list[object] = []
    ended: list[Reason] = []
    node = SimpleNamespace(task=worker(0), words_about=lambda *_: others, post=posted.append)
    keeper = PeerKeeper(cast(NodeSide, node), server(1), ELSEWHERE, dials=False, tasks=4)
    link = SimpleNamespace(up=True, was_up=True, incarnation=7, heard_at=time.monotonic() - 3, end=ended.append)
    keeper._connection = cast(Connection, link)
    answer = MonitorAnswer(Probe(found, "no packet comes back"))
    monkeypatch.setattr("lockstep.runtime.task.peers.query_monitor_quickly", lambda *_: answer)
    keeper._give_up_if_its_host_is_gone()
    return posted, ended


def test_a_server_with_a_second_home_whose_host_vanished_is_gone_once_most_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No connection breaks: without this the job would wait until it counts as stalled."""
    posted, ended = silent_server([CUT, CUT], Reach.SILENT, monkeypatch)
    (gone,) = posted
    assert isinstance(gone, PeerGone)
    assert (gone.peer, gone.incarnation, gone.reason.cause) == (server(1), 7, Cause.DEAD)
    assert ended == [gone.reason]


@pytest.mark.parametrize(
    ("others", "found"), [([CUT, HEARS], Reach.SILENT), ([CUT, NONE], Reach.SILENT), ([CUT, CUT], Reach.MUTE)]
)
def test_a_silent_server_is_not_gone_without_proof(
    others: list[Word], found: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert silent_server(others, found, monkeypatch) == ([], [])
