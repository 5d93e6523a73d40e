"""Who may say what: every decision of a job belongs to one task, and is ignored from any other.

Tasks prove to each other that they belong to the job, and each link names its two ends; this is checked where messages
arrive, by the name of the link's other end. So a worker gone wrong, or a leftover of another life, cannot commit a
step, end the job or change a learning rate.
"""

from __future__ import annotations

from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.messages import (
    Answer,
    Applied,
    BucketCopy,
    CallComplete,
    CallMade,
    CallOpen,
    Commit,
    Contributors,
    Coordinates,
    Description,
    Done,
    End,
    Failed,
    Grant,
    HandOn,
    Heartbeat,
    Hello,
    Holding,
    Join,
    KeptCall,
    Layout,
    Leaving,
    Left,
    LocalState,
    Lost,
    Message,
    Open,
    PartialNorm,
    Printed,
    Pull,
    Question,
    Rates,
    Refused,
    Report,
    Resolution,
    ResolutionHeld,
    Roster,
    Saved,
    Seal,
    SecondWhole,
    TotalNorm,
    View,
)


class Speaker(Enum):
    """Whose a message is."""

    COORDINATOR = auto()
    WORKER = auto()
    HOME = auto()
    """A server; without servers, any worker."""
    ANY = auto()
    NOBODY = auto()
    """It does not come over a link, or only before the link is up."""


SPEAKERS: Final = MappingProxyType[type[Message], Speaker](
    {
        **dict.fromkeys(
            (Commit, Contributors, End, Left, Printed, Refused, Report, Resolution, Roster, TotalNorm, View),
            Speaker.COORDINATOR,
        ),
        **dict.fromkeys((CallComplete, CallOpen, KeptCall), Speaker.COORDINATOR),
        # Of the rates of all workers, servers take the chief's (``ServerMachine._on_rates``).
        **dict.fromkeys((CallMade, Done, Layout, LocalState, Pull, Question, Rates, Seal), Speaker.WORKER),
        **dict.fromkeys(
            (
                Answer,
                Applied,
                BucketCopy,
                Coordinates,
                Grant,
                HandOn,
                Holding,
                Open,
                PartialNorm,
                ResolutionHeld,
                Saved,
            ),
            Speaker.HOME,
        ),
        SecondWhole: Speaker.HOME,
        **dict.fromkeys((Failed, Heartbeat, Join, Leaving, Lost), Speaker.ANY),
        **dict.fromkeys((Description, Hello), Speaker.NOBODY),
    }
)


def may_say(peer: TaskId, message: Message, coordinator: TaskId) -> bool:
    """Whether the task at the other end of a link is one whose message this is."""
    match SPEAKERS[type(message)]:
        case Speaker.COORDINATOR:
            return peer == coordinator
        case Speaker.WORKER:
            return peer.role is Role.WORKER
        case Speaker.HOME:
            # Without servers the coordinator runs on a worker, and every worker is the home of some buckets.
            return peer.role is coordinator.role
        case Speaker.ANY:
            return True
        case Speaker.NOBODY:
            return False
