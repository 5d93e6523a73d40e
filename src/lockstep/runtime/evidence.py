"""What became of a task: its monitor's word, in phrases."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import Any

from lockstep.protocol.ids import Incarnation, TaskId
from lockstep.protocol.messages import Description
from lockstep.runtime.knock import Answer, greet, knock
from lockstep.transports.wire.monitor_client import Unreachable, describe, fetch_snapshot

ASK_SECONDS = 1.0
ASK_SECONDS_PER_TASK = 0.1
_MOST_REASON = 500
IS_UP = "is up, "
"""How the finding of a task begins with which all is well so far."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found at the address of a task; ``text`` is a phrase that goes on from the address."""

    text: str
    description: Description | None = None
    reachable: bool = False
    answer: Answer = Answer.LOCKSTEP
    note: str = ""

    @property
    def task_address(self) -> str:
        """Where the task itself listens; empty while it does not."""
        ready = self.description is not None and not self.description.exited
        return self.description.task_address if ready and self.description is not None else ""

    def phrase(self, seconds: float) -> str:
        """The text, with how long this has been found already."""
        match self.answer:
            case Answer.REFUSED:
                return f"refuses connections since {seconds:.0f} s; nothing listens there{self.note}"
            case Answer.SILENT:
                why = "the host is down, or a firewall drops the packets"
                return f"gives no answer since {seconds:.0f} s: {why}{self.note}"
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
    if knocked.answer is not Answer.OPEN:
        return Finding(knocked.detail, answer=knocked.answer, note=knocked.note)
    try:
        found = describe(address, seconds)
    except Unreachable as error:
        greeted = greet(address)
        if greeted.answer is Answer.OPEN:
            return Finding(f"accepts connections, but {error.reason}", answer=Answer.MUTE)
        return Finding(greeted.detail, answer=greeted.answer)
    if found.task != str(task):
        return Finding(f"is {found.task} there, not {task}: the host lists or the task indices do not fit", None, True)
    if found.exited:
        return Finding(how_it_ended(found) + _last_words(found, address), found, True)
    return Finding(f"{IS_UP}{found.phase} (process {found.pid} on {found.host})", found, True)


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
    who = f"process {found.pid} on {found.host}"
    if found.exit_code < 0:
        try:
            name = signal.Signals(-found.exit_code).name
        except ValueError:
            name = f"signal {-found.exit_code}"
        return f"was killed by {name} ({who})"
    return f"ended with exit code {found.exit_code} ({who})"


def proof_of_end(finding: Finding, incarnation: Incarnation) -> str | None:
    """Why this life of the task is over for certain, or None while it may still live.

    An exit code of 0 is no proof of trouble: at the end of a job tasks leave one after the other.
    """
    found = finding.description
    if found is None:
        return None
    if found.exited and found.incarnation in (0, incarnation):
        return finding.text if found.exit_code != 0 else None
    if found.incarnation not in (0, incarnation):
        return f"was started again as process {found.pid} on {found.host}; its former life is gone"
    return None


def lack_of_memory(finding: Finding, address: str) -> str:
    """``, for lack of memory: ...`` where the monitor has seen that the kernel killed its task for that; else empty."""
    found = finding.description
    if found is None or not found.exited or found.exit_code != -signal.SIGKILL:
        return ""
    evidence = _snapshot_of(address).get("out_of_memory")
    return f", for lack of memory: {evidence}" if isinstance(evidence, str) and evidence else ""
