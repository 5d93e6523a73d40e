"""What became of a task: its monitor's word, in phrases."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, replace
from typing import Any

from lockstep.protocol.causes import Cause, Reason
from lockstep.protocol.ids import Incarnation, TaskId
from lockstep.protocol.messages import Description
from lockstep.protocol.reach import Reach
from lockstep.protocol.timing import ASK_SECONDS
from lockstep.runtime import phrases
from lockstep.runtime.knock import greet, knock
from lockstep.transports.wire.monitor_client import Unreachable, describe, fetch_snapshot

ASK_SECONDS_PER_TASK = 0.1
_MOST_REASON = 500


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found at the address of a task; ``text`` is a phrase that goes on from the address."""

    text: str
    description: Description | None = None
    reachable: bool = False
    answer: Reach = Reach.LOCKSTEP
    note: str = ""
    refusal: Cause | None = None
    """Why the task there refuses a link, where it does."""
    no_link: bool = False
    """Its monitor was reached, but a link to the task itself could not be opened."""

    @property
    def task_address(self) -> str:
        """Where the task itself listens; empty while it does not."""
        ready = self.description is not None and not self.description.exited
        return self.description.task_address if ready and self.description is not None else ""

    @property
    def is_up(self) -> bool:
        """All is well with it so far, and no link to it has failed."""
        return self.description is not None and not self.description.exited and not self.no_link

    def phrase(self, seconds: float) -> str:
        """The text, with how long this has been found already."""
        match self.answer:
            case Reach.REFUSED:
                return phrases.refuses_since(seconds) + self.note
            case Reach.SILENT:
                return phrases.no_answer_since(seconds) + self.note
            case _:
                return f"{self.text}{self.note}"


def ask_seconds(tasks: int) -> float:
    """How long a monitor of a cluster of this size may take to answer: all start at once, perhaps on one machine."""
    return max(ASK_SECONDS, ASK_SECONDS_PER_TASK * tasks)


def look(task: TaskId, address: str, seconds: float = ASK_SECONDS) -> Finding:
    """Ask the monitor at ``address`` what its task does; takes about a second, two if what answers is no monitor.

    ``seconds``: how long one that accepts connections may take to answer.
    """
    knocked = knock(address, ASK_SECONDS)
    if knocked.answer is not Reach.OPEN:
        return Finding(knocked.detail, answer=knocked.answer, note=knocked.note)
    try:
        found = describe(address, seconds)
    except Unreachable as error:
        greeted = greet(address)
        if greeted.answer is Reach.OPEN:
            return Finding(phrases.accepts_but(error.reason), answer=Reach.MUTE)
        return Finding(greeted.detail, answer=greeted.answer)
    if found.task != str(task):
        return Finding(phrases.is_another_task(found.task, task), None, True, refusal=Cause.WIRING)
    if found.exited:
        return Finding(how_it_ended(found) + _last_words(found, address), found, True)
    return Finding(phrases.is_up(found.phase, found.pid, found.host), found, True)


def _last_words(found: Description, address: str) -> str:
    """``: REASON`` where the task told its monitor why it gave up; those who came too late to be told read it here."""
    if found.exit_code <= 0:
        return ""
    reason = _snapshot_of(address).get("reason")
    return f": {reason[:_MOST_REASON]}" if isinstance(reason, str) and reason else ""


def _snapshot_of(address: str) -> dict[str, Any]:
    try:
        said = json.loads(fetch_snapshot(address, "Monitor", ASK_SECONDS))
    except (Unreachable, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def how_it_ended(found: Description) -> str:
    """``was killed by SIGKILL (process 123 on host)``."""
    return phrases.how_it_ended(found.exit_code, found.pid, found.host)


def proof_of_end(finding: Finding, incarnation: Incarnation) -> Reason | None:
    """Why this life of the task is over for certain, or None while it may still live.

    An exit code of 0 is no proof of trouble: at the end of a job tasks leave one after the other.
    """
    found = finding.description
    if found is None:
        return None
    if found.exited and found.incarnation in (0, incarnation):
        return _ended(Cause.DEAD, finding.text, found) if found.exit_code != 0 else None
    if found.incarnation not in (0, incarnation):
        return Reason(Cause.STALE_INCARNATION, phrases.started_again(found.pid, found.host))
    return None


def left_early(finding: Finding) -> Reason | None:
    """It has ended well, although the job has not; None where it has not ended."""
    found = finding.description
    if found is None or not found.exited:
        return None
    return _ended(Cause.DEAD, phrases.left_early(finding.text), found)


def _ended(cause: Cause, text: str, found: Description) -> Reason:
    return Reason(cause, text, host=found.host, pid=found.pid, exit_code=found.exit_code)


def with_lack_of_memory(reason: Reason, address: str) -> Reason:
    """The same end, explained where its monitor has seen that the kernel killed the task for lack of memory."""
    if reason.exit_code != -signal.SIGKILL:
        return reason
    evidence = _snapshot_of(address).get("out_of_memory")
    if not isinstance(evidence, str):
        return reason
    return replace(reason, cause=Cause.OUT_OF_MEMORY, text=phrases.lack_of_memory(reason.text, evidence))
