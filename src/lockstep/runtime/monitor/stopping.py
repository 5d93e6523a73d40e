"""What a person's signals mean: the first asks for an orderly end, the second or too long a wait kills."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from lockstep.protocol.timing import SAME_SIGNAL_SECONDS


class Action(Enum):
    """What to do with the processes below."""

    ASK = "ask"
    KILL = "kill"


class Stopping:
    """Remembers which signal asked for the end, and until when the end is waited for."""

    def __init__(self, patience: float, by_signal: Mapping[int, float] | None = None) -> None:
        """``by_signal``: where the end that a signal asks for may take another time."""
        self._patience = patience
        self._by_signal = by_signal or {}
        self._asked_at = 0.0
        self._killed = False
        self.signum: int | None = None
        """The first stop signal; None as long as nobody asked."""

    def on_signal(self, signum: int, now: float) -> Action | None:
        """What this signal asks for; None if it is a repetition."""
        if self.signum is None:
            self.signum, self._asked_at = signum, now
            return Action.ASK
        if self._killed or now - self._asked_at < SAME_SIGNAL_SECONDS:
            return None
        self._killed = True
        return Action.KILL

    def on_time(self, now: float) -> Action | None:
        """KILL, once, when patience has run out."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return None
        self._killed = True
        return Action.KILL

    def next_deadline(self) -> float | None:
        """When ``on_time`` has something to say."""
        if self.signum is None or self._killed:
            return None
        return self._asked_at + self.patience

    @property
    def patience(self) -> float:
        """How long the end that was asked for may take."""
        return self._patience if self.signum is None else self._by_signal.get(self.signum, self._patience)
