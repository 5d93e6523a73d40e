"""One visit to the address of a task: what answers there, and what it reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.doctor.facts import DOCTOR_PHASE, MAX_ENTRIES, MAX_TEXT, PeerReport, Visit, read_shared, read_visits
from lockstep.doctor.listening import SERVICE
from lockstep.doctor.posture import RunningTask
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.timing import ASK_SECONDS
from lockstep.protocol.core.waits import WaitKind
from lockstep.runtime.startup.start_facts import read_start_facts
from lockstep.transports.control.monitor_client import snapshot_fields, tell
from lockstep.transports.control.monitor_query import query_monitor
from lockstep.transports.control.tcp_probe import probe


@dataclass(frozen=True, slots=True)
class VisitResult:
    """The result of one visit: the visit itself, what the task that answered reported, and what that task sees."""

    visit: Visit
    report: PeerReport | None = None
    its_visits: tuple[Visit, ...] = ()
    nonce: int = 0
    told_at: float = 0.0
    """By the clock of the task that answered."""
    seen_at: float = field(default_factory=time.monotonic)
    """By this machine's monotonic clock."""
    running: RunningTask | None = None
    """Its processes, if its monitor answered and they live."""


def look_at(visitor: TaskId, task: TaskId, address: str, word: bytes = b"") -> VisitResult:
    """Takes up to three seconds; each step has a deadline. ``word`` is left with a doctor that answers there."""
    answer = query_monitor(address)
    found = answer.description
    if found is None:
        words = f"{answer.found.phrase}{answer.found.note}"
        return VisitResult(Visit(str(visitor), str(task), address, answer.found.reach, words))
    visit = Visit(
        str(visitor),
        str(task),
        address,
        Reach.LOCKSTEP,
        words=f"is {found.task}",
        task=found.task,
        phase=TaskPhase.ENDED if found.exited else found.phase,
        phase_seconds=found.phase_seconds,
        process=f"process {found.pid or found.monitor_pid} on {found.host}",
        version=found.version,
        job=found.job,
    )
    if found.task != str(task):
        return VisitResult(visit, nonce=found.incarnation)
    if word and found.phase == DOCTOR_PHASE:
        leave_word(address, word)
    return _ask(visit, found, address)


def _ask(visit: Visit, found: Description, address: str) -> VisitResult:
    began = time.time()
    said = snapshot_fields(address, "Monitor")
    doubt = (time.time() - began) / 2
    told_time = said.get("time")
    ahead = float(told_time) - (began + doubt) if isinstance(told_time, int | float) else 0.0
    by_doctor = found.phase == DOCTOR_PHASE
    report = PeerReport(
        task=found.task,
        host=found.host,
        by_doctor=by_doctor,
        start=read_start_facts(said.get("start")),
        shared=read_shared(said.get("shared")),
        clock_ahead=ahead,
        clock_doubt=doubt,
        done=not by_doctor or said.get("done") is True,
    )
    second = str(said.get("side", ""))[:MAX_TEXT] if by_doctor else found.task_address
    visit = replace(visit, other_port=_try_second_port(second, found))
    if found.job and not visit.other_port:
        visit = replace(visit, waits_for=_lost_tasks(found))
    its_visits = read_visits(said.get("visits")) if by_doctor else _links_of(visit, found)
    pids = tuple(dict.fromkeys(pid for pid in (found.monitor_pid, found.pid) if pid > 0))
    running = None if by_doctor or found.exited else RunningTask(pids, found.task_address)
    return VisitResult(visit, report, its_visits, found.incarnation, told_at(said), running=running)


def leave_word(address: str, word: bytes) -> None:
    """Send the doctor at this address what this one has seen."""
    tell(address, SERVICE, word, ASK_SECONDS)


def told_at(said: dict[str, Any]) -> float:
    """When it was written, by the clock of its author."""
    moment = said.get("time")
    return float(moment) if isinstance(moment, int | float) else 0.0


def heard_from(told: dict[str, Any], task: str) -> tuple[PeerReport, tuple[Visit, ...]]:
    """The same from a doctor that sent it unasked; its clock cannot be compared this way."""
    report = PeerReport(
        task=task,
        host=str(told.get("host", ""))[:MAX_TEXT],
        by_doctor=True,
        start=read_start_facts(told.get("start")),
        shared=read_shared(told.get("shared")),
        done=told.get("done") is True,
    )
    return report, read_visits(told.get("visits"))


def _try_second_port(address: str, found: Description) -> str:
    if not address or found.exited:
        return ""
    probed = probe(address)
    # A task that has just ended refuses connections, which does not point to a firewall.
    return f"{address} {probed.phrase}" if probed.no_packet_returns else ""


def _lost_tasks(found: Description) -> tuple[str, ...]:
    """The tasks that a running job has lost and waits for."""
    if not found.task_address or found.exited:
        return ()
    waits = snapshot_fields(found.task_address, "Task").get("waits")
    read = waits[:MAX_ENTRIES] if isinstance(waits, list) else []
    lost = (one for one in read if isinstance(one, dict) and one.get("kind") == WaitKind.RETURN)
    return tuple(str(one.get("on", ""))[:MAX_TEXT] for one in lost)


def _links_of(visit: Visit, found: Description) -> tuple[Visit, ...]:
    """What a task of a starting job sees itself: the links that it needs and does not have yet."""
    if visit.other_port or not found.task_address or found.exited or found.job:
        return ()
    links = snapshot_fields(found.task_address, "Task").get("links", ())
    read = (_link(found.task, link) for link in links[:MAX_ENTRIES] if isinstance(link, dict))
    return tuple(one for one in read if one is not None)


def _link(task: str, link: dict[str, Any]) -> Visit | None:
    try:
        peer = str(TaskId.parse(str(link["peer"])))
        front, words = str(link["front"])[:MAX_TEXT], str(link["finding"])[:MAX_TEXT]
        answer = Reach(link["answer"])
        tried = int(link["attempts"]) > 0 or link["state"] == "up"
    except (KeyError, ValueError, TypeError):
        return None
    if not tried:
        return None
    if link["state"] == "up" or answer is Reach.LOCKSTEP:
        return Visit(task, peer, front, Reach.LOCKSTEP, words, peer)
    return Visit(task, peer, front, answer, words)
