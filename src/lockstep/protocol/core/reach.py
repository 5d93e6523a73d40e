"""What is found at the address of a task: which kind of answer, or of silence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reach(StrEnum):
    """What was found at an address."""

    LOCKSTEP = "Lockstep"
    UNRESOLVED = "its name does not resolve"
    REFUSED = "refused"
    SILENT = "silent"
    """No packet comes back."""
    NO_ROUTE = "no route"
    MUTE = "accepts and says nothing"
    OTHER_PROGRAM = "another program"
    OTHER_KEY = "another key"
    """Lockstep, but it and this task cannot prove to each other that they belong together."""
    INSECURE = "insecure on one side"
    """Lockstep, but one of the two was started with ``--insecure`` and the other was not."""
    OPEN = "open"
    """A connection works; the task behind it was not identified."""
    BROKEN = "broken"
    """A connection failed in some other way, or the answer cannot be read."""
    NOT_ASKED = "not asked"


NOBODY_THERE = frozenset({Reach.REFUSED, Reach.UNRESOLVED})
UNPROVEN = frozenset({Reach.OTHER_KEY, Reach.INSECURE})
UNREACHABLE = frozenset({*NOBODY_THERE, *UNPROVEN, Reach.SILENT, Reach.NO_ROUTE, Reach.BROKEN, Reach.OTHER_PROGRAM})
"""The task cannot be reached. One that accepts connections and says nothing can be: it may only be paused."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a task or its monitor gave no answer; ``text`` is for people."""

    reach: Reach
    text: str = ""


NOT_SILENT = Silence(Reach.LOCKSTEP)
NOT_ASKED = Silence(Reach.NOT_ASKED, "not asked")
