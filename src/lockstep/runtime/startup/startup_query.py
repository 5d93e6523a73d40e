"""When a cluster does not form: asks other tasks what they were started with, and what they see themselves.

Everything here asks a few monitors, each with a deadline, on a thread that may block.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.timing import INQUIRY_SECONDS
from lockstep.runtime import phrases
from lockstep.runtime.startup.address_finding import AddressFinding
from lockstep.runtime.startup.start_facts import StartFacts, list_difference, read_start_facts
from lockstep.transports.control.monitor_client import snapshot_fields
from lockstep.transports.control.tcp_probe import probe

_MOST_ASKED = 8


def ask_start(address: str) -> StartFacts | None:
    """What the task behind the monitor at ``address`` was started with; None if that cannot be found out."""
    if not probe(address).is_open:
        return None
    return read_start_facts(snapshot_fields(address, "Monitor").get("start"))


def why_it_does_not_come(ours: StartFacts, finding: AddressFinding, address: str) -> str:
    """Why a task that is up at ``address`` does not join, in a phrase; empty if no reason is found."""
    found = finding.description
    assert found is not None
    if found.version != ours.version:
        return phrases.other_version(found.version, ours.task, ours.version)
    theirs = read_start_facts(snapshot_fields(address, "Monitor").get("start"))
    if theirs is not None and (difference := list_difference(ours, theirs)) is not None:
        return phrases.is_up_but(difference)
    if not found.task_address or not probe(found.task_address).is_open:
        return ""
    for link in snapshot_fields(found.task_address, "Task").get("links", ()):
        if isinstance(link, dict) and link.get("peer") == ours.task and link.get("state") != "up":
            return _as_seen_from_there(ours, found.pid, found.host, link)
    return ""


def _as_seen_from_there(ours: StartFacts, pid: int, host: str, link: dict[str, Any]) -> str:
    front, finding = str(link.get("front", ""))[:300], str(link.get("finding", ""))[:1000]
    if not front or not int(link.get("attempts", 0)) or link.get("found_up") is True:
        return ""  # it has not looked yet, or it reaches us and the link is about to open
    return phrases.does_not_reach(pid, host, ours.task, front, finding)


def difference_with_any(ours: StartFacts, theirs: Iterable[StartFacts] | None) -> str:
    """The first difference from the host lists of others; if ``theirs`` is None, asks the tasks in our own lists."""
    for facts in _asked(ours) if theirs is None else theirs:
        difference = list_difference(ours, facts)
        if difference is not None:
            return difference
    return ""


def _asked(ours: StartFacts) -> Iterable[StartFacts]:
    deadline = time.monotonic() + INQUIRY_SECONDS
    others = [
        address
        for role in Role
        for index, address in enumerate(ours.hosts(role))
        if str(TaskId(role, index)) != ours.task
    ]
    asked = 0
    for address in others:
        if asked >= _MOST_ASKED or time.monotonic() > deadline:
            return
        facts = ask_start(address)
        if facts is not None:
            asked += 1
            yield facts
