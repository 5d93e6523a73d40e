"""What happened to a task, according to its monitor, in phrases."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import NOBODY_THERE, Reach
from lockstep.protocol.core.timing import ASK_SECONDS
from lockstep.runtime import phrases
from lockstep.transports.control.monitor_client import snapshot_fields
from lockstep.transports.control.monitor_query import query_monitor

ASK_SECONDS_PER_TASK = 0.1
_MOST_REASON = 500


@dataclass(frozen=True, slots=True)
class AddressFinding:
    """What was found at the address of a task; ``text`` is a phrase that continues from the address."""

    text: str
    description: Description | None = None
    reachable: bool = False
    answer: Reach = Reach.LOCKSTEP
    note: str = ""
    refusal: Cause | None = None
    """Why the task there refuses a link, if it does."""
    no_link: bool = False
    """Its monitor was reached, but a link to the task itself could not be opened."""

    @property
    def task_address(self) -> str:
        """Where the task itself listens; empty while it does not."""
        ready = self.description is not None and not self.description.exited
        return self.description.task_address if ready and self.description is not None else ""

    @property
    def is_up(self) -> bool:
        """It has not ended, and no link to it has failed."""
        return self.description is not None and not self.description.exited and not self.no_link

    def phrase(self, seconds: float) -> str:
        """The text, with how long this has been the case."""
        match self.answer:
            case Reach.REFUSED:
                return phrases.refuses_since(seconds) + self.note
            case Reach.SILENT:
                return phrases.no_answer_since(seconds) + self.note
            case _:
                return f"{self.text}{self.note}"


class EndMemory:
    """How a task ended, as its monitor said, for the time after the monitor has left, too."""

    def __init__(self) -> None:
        self.how = ""
        """``ended with exit code 2 (process 9 on host): REASON``; empty if none has ended, or another has started."""
        self._at = 0.0

    def with_end(self, finding: AddressFinding, now: float) -> AddressFinding:
        """The finding; where nobody is there any more, with a note of how the task that was there had ended."""
        found = finding.description
        if found is not None:
            self.how, self._at = finding.text if found.exited else "", now - found.phase_seconds
        if found is not None or not self.how or finding.answer not in NOBODY_THERE:
            return finding
        return replace(finding, note=finding.note + phrases.had_ended(self.how, now - self._at))


def ask_seconds(tasks: int) -> float:
    """How long a monitor may take to answer in a cluster of this size: all start at once, perhaps on one machine."""
    return max(ASK_SECONDS, ASK_SECONDS_PER_TASK * tasks)


def look(task: TaskId, address: str, seconds: float = ASK_SECONDS) -> AddressFinding:
    """Ask the monitor at ``address`` what its task does; as ``query_monitor``, in phrases about this task."""
    answer = query_monitor(address, seconds)
    found = answer.description
    if found is None:
        return AddressFinding(answer.found.phrase, answer=answer.found.reach, note=answer.found.note)
    if found.task != str(task):
        return AddressFinding(phrases.is_another_task(found.task, task), None, True, refusal=Cause.WIRING)
    if found.exited:
        return AddressFinding(how_it_ended(found) + _last_words(found, address), found, True)
    return AddressFinding(phrases.is_up(found.phase, found.pid, found.host), found, True)


def _last_words(found: Description, address: str) -> str:
    """``: REASON`` if the task reported to its monitor why it gave up, for peers that its own message did not reach."""
    if found.exit_code <= 0:
        return ""
    reason = snapshot_fields(address, "Monitor").get("reason")
    return f": {reason[:_MOST_REASON]}" if isinstance(reason, str) and reason else ""


def how_it_ended(found: Description) -> str:
    """``was killed by SIGKILL (process 123 on host)``."""
    return phrases.how_it_ended(found.exit_code, found.pid, found.host)


def proof_of_end(finding: AddressFinding, incarnation: Incarnation) -> Reason | None:
    """Why this incarnation of the task is certainly over, or None while it may still run.

    An exit code of 0 does not prove a failure: at the end of a job tasks leave one after the other.
    """
    found = finding.description
    if found is None:
        return None
    if found.exited and found.incarnation in (0, incarnation):
        return _ended(Cause.DEAD, finding.text, found) if found.exit_code != 0 else None
    if found.incarnation not in (0, incarnation):
        return Reason(Cause.STALE_INCARNATION, phrases.started_again(found.pid, found.host))
    return None


def proof_of_restart(finding: AddressFinding, incarnation: Incarnation) -> Reason | None:
    """Why this incarnation is over although its monitor reports no end: it has started the next one already. Nobody
    waits for that one where another task takes the place of the one that is lost."""
    found = finding.description
    if found is None or not incarnation or found.former != incarnation:
        return None
    return Reason(Cause.STALE_INCARNATION, phrases.former_life_gone(incarnation))


def left_early(finding: AddressFinding) -> Reason | None:
    """Why it counts as lost: it has ended although the job has not. None if it has not ended."""
    found = finding.description
    if found is None or not found.exited:
        return None
    return _ended(Cause.DEAD, phrases.left_early(finding.text), found)


def _ended(cause: Cause, text: str, found: Description) -> Reason:
    return Reason(cause, text, host=found.host, pid=found.pid, exit_code=found.exit_code)


def with_lack_of_memory(reason: Reason, address: str) -> Reason:
    """The same end, with the explanation if its monitor saw the kernel kill the task for lack of memory."""
    if reason.exit_code != -signal.SIGKILL:
        return reason
    evidence = snapshot_fields(address, "Monitor").get("out_of_memory")
    if not isinstance(evidence, str):
        return reason
    return replace(reason, cause=Cause.OUT_OF_MEMORY, text=phrases.lack_of_memory(reason.text, evidence))
