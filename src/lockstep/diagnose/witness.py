"""Other tasks as witnesses of one that does not answer: what do they find at its address?

One task that cannot reach another does not know whether that one is dead or the network between the two is cut. A
witness that reaches it passes on its snapshots, too, so that both ends of a broken link can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Final

from lockstep.diagnose.collect import is_absent, look_at
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.fields import SnapshotError
from lockstep.diagnose.monitor_view import read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.views import MonitorView, TaskView
from lockstep.foreign import JsonError, read_json
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.reach import NOT_SILENT, UNREACHABLE, Reach
from lockstep.protocol.core.timing import (
    ASK_SECONDS,
    HEARD_SECONDS,
    PROBE_ALL_SECONDS,
    WITNESS_ASK_SECONDS,
    WITNESS_SECONDS,
)
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_snapshot, fetch_statement
from lockstep.transports.control.monitor_query import query_monitor_quickly

MOST_SUSPECTS: Final = 4
MOST_WITNESSES: Final = 64
"""More answers would not change the ruling in time, and every one of them costs the suspect's host a connection."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What one witness knows of a task."""

    heard: bool = False
    """The witness has a link to it and hears from it."""
    absent: bool = False
    """The witness is on the same host, and nothing listens at the address."""
    reach: Reach = Reach.NOT_ASKED
    monitor: MonitorView | None = None
    view: TaskView | None = None

    def word(self, incarnation: str = "") -> Word:
        """``incarnation``: the one that is missed; empty: whichever it has now."""
        if self.monitor is not None:
            known, now = incarnation.strip("0"), self.monitor.incarnation.strip("0")
            if known and now and known != now:
                return Word.REPLACED
            if self.monitor.exited:  # with code 0 it has left after its work, as all do
                return Word.ENDED if self.monitor.exit_code != 0 else Word.NONE
            return Word.HEARS
        if self.absent:
            return Word.ABSENT
        if self.heard:
            return Word.HEARS
        return Word.UNREACHABLE if self.reach in UNREACHABLE else Word.NONE


# -- the witness --


def make_statement(address: str, *, heard: bool) -> bytes:
    """JSON of what is found at the ``address`` of another task, with its snapshots where it answers."""
    answer = query_monitor_quickly(address, WITNESS_ASK_SECONDS)
    reach = answer.found.reach
    fields: dict[str, Any] = {"heard": heard, "reach": reach.value, "absent": is_absent(address, reach)}
    if answer.description is not None:
        fields["monitor"] = _parsed(answer.snapshot)
        if answer.description.task_address and not answer.description.exited:
            fields["task"] = _snapshot(answer.description.task_address)
    return json.dumps(fields).encode()


def _snapshot(address: str) -> object:
    try:
        return _parsed(fetch_snapshot(address, "Task", WITNESS_ASK_SECONDS, 0.0))
    except Unreachable:
        return None


def _parsed(data: bytes) -> object:
    try:
        return read_json(data)
    except JsonError:
        return None


# -- who asks --


def read_statement(data: bytes) -> Statement:
    """Nothing in it is trusted: what cannot be read counts as not said."""
    fields = _parsed(data)
    if not isinstance(fields, dict):
        return Statement()
    reach = next((one for one in Reach if one.value == fields.get("reach")), Reach.NOT_ASKED)
    heard, absent = fields.get("heard") is True, fields.get("absent") is True
    try:
        monitor = read_monitor(json.dumps(fields.get("monitor")).encode())
    except SnapshotError:
        return Statement(heard, absent, reach)
    try:
        return Statement(heard, absent, reach, monitor, read_task(json.dumps(fields.get("task")).encode()))
    except SnapshotError:
        return Statement(heard, absent, reach, monitor)


def ask_witnesses(suspect: str, fronts: Mapping[str, str]) -> dict[str, Statement]:
    """What the tasks with these monitors know of ``suspect``; bounded by a few seconds, whoever answers."""

    def ask(front: str) -> Statement:
        try:
            return _ask_one(describe(front, WITNESS_ASK_SECONDS).task_address, suspect)
        except Unreachable:
            return Statement()

    asked = list(fronts.items())[:MOST_WITNESSES]
    if not asked:
        return {}
    pool = ThreadPoolExecutor(len(asked), thread_name_prefix="witness")
    try:
        futures = {task: pool.submit(ask, front) for task, front in asked}
        wait(futures.values(), timeout=WITNESS_ASK_SECONDS + PROBE_ALL_SECONDS + WITNESS_SECONDS)
        return {task: future.result() for task, future in futures.items() if future.done()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask_one(address: str, suspect: str) -> Statement:
    try:
        return read_statement(fetch_statement(address, suspect, WITNESS_SECONDS)) if address else Statement()
    except Unreachable:
        return Statement()


def with_witnesses(found: Mapping[str, Seen], asker: str) -> dict[str, Seen]:
    """The same, where tasks that do not answer are looked at twice, and through the eyes of the others."""
    missed = [seen for seen in found.values() if seen.task != asker and _is_missed(seen, found)]
    suspects = missed[:MOST_SUSPECTS]
    if not suspects:
        return dict(found)
    witnesses = {
        task: seen.monitor.task_address
        for task, seen in found.items()
        if seen.view is not None and seen.monitor is not None and task != asker
    }
    pairs = [(seen.task, task) for seen in suspects for task in list(witnesses)[:MOST_WITNESSES]]
    pool = ThreadPoolExecutor(len(pairs) + len(suspects), thread_name_prefix="witness")
    try:
        said = {(one, by): pool.submit(_ask_one, witnesses[by], one) for one, by in pairs}
        again = {seen.task: pool.submit(_look_again, seen) for seen in suspects}
        running: list[Future[Any]] = [*said.values(), *again.values()]
        wait(running, timeout=WITNESS_SECONDS + PROBE_ALL_SECONDS)
        return {**found, **{seen.task: _merged(_result(again[seen.task], seen), said, asker) for seen in suspects}}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _is_missed(seen: Seen, found: Mapping[str, Seen]) -> bool:
    """Its monitor does not answer; or the task does not, although another hears from it: then it may be too far away
    for a whole snapshot, and another one nearer."""
    if seen.monitor is None or seen.view is not None:
        return seen.monitor is None
    links = [other.view.links.get(seen.task) for other in found.values() if other.view is not None]
    heard = any(link is not None and link.up and 0 <= link.heard < HEARD_SECONDS for link in links)
    return heard and not seen.monitor.exited and seen.monitor.stopped < 0


def _look_again(seen: Seen) -> Seen:
    """A monitor that was only slow answers a more patient question."""
    return look_at(seen.task, seen.address, ASK_SECONDS) if seen.monitor_silence.reach is Reach.MUTE else seen


def _result(future: Future[Seen], otherwise: Seen) -> Seen:
    return future.result() if future.done() else otherwise


def _merged(seen: Seen, said: Mapping[tuple[str, str], Future[Statement]], asker: str) -> Seen:
    known = {by: future.result() for (one, by), future in said.items() if one == seen.task and future.done()}
    own = Statement(reach=seen.monitor_silence.reach)
    words = {**seen.words, asker: own.word(), **{by: statement.word() for by, statement in known.items()}}
    relayed = next((one for one in known.values() if one.monitor is not None), None)
    if relayed is None or seen.view is not None:
        return replace(seen, words=words)
    silence = NOT_SILENT if relayed.view is not None else seen.silence
    return replace(seen, words=words, monitor=seen.monitor or relayed.monitor, view=relayed.view, silence=silence)
