"""Every caller that a process refuses, at whatever it listens: counted here, and said here, at a bounded rate.

Strangers must not be able to fill a log or a memory. Each entrance has one line when its first caller is refused, and
then at most one per ``EVERY_SECONDS``, with the number of those that came meanwhile. ``note`` only counts; the lines
are written by a thread that exists while there is something to say, so a full pipe holds up no one else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from lockstep import terminal
from lockstep.security.proof import ProofError, Refusal, sentence_of

EVERY_SECONDS: Final = 30.0
REFUSALS_THREAD: Final = "refusals"
MOST_ADDRESSES: Final = 256
"""More are not told apart between two lines."""


class Entrance(StrEnum):
    """What listened."""

    MONITOR = "the monitor's port"
    TASK = "the task's port"
    TENSORS = "the port for tensors"
    DOOR = "the door of shared memory"
    RENDEZVOUS = "the rendezvous"
    NET = "lockstep net --serve"
    DOCTOR = "lockstep doctor"
    METRICS = "the port for metrics"
    WATCH = "lockstep watch"


@dataclass(frozen=True, slots=True)
class RefusalNotice:
    """One line: how many were refused at one entrance since the line before, and the last of them."""

    entrance: Entrance
    at: str
    """The address of the entrance; empty for the door."""
    caller: str
    """The host of the last one, or its user and process; empty: not known."""
    refusal: Refusal
    callers: int
    addresses: int
    """How many different ones; ``MOST_ADDRESSES`` means that or more."""

    def __str__(self) -> str:
        where = f"{self.entrance}{f' ({self.at})' if self.at else ''}"
        who, why = self.caller or "an unknown address", sentence_of(self.refusal)
        if self.callers == 1:
            return f"refused a caller at {where}: {who}: {why}"
        several = f"from {_counted(self.addresses)}; " if self.addresses else ""
        return f"refused {self.callers} callers at {where}, {several}the last, {who}: {why}"


def _counted(addresses: int) -> str:
    most = " or more" if addresses >= MOST_ADDRESSES else ""
    return "1 address" if addresses == 1 else f"{addresses}{most} addresses"


@dataclass(slots=True)
class _Unsaid:
    """What has happened at one entrance since its last line."""

    said_at: float
    at: str = ""
    caller: str = ""
    refusal: Refusal = Refusal.CLOSED
    callers: int = 0
    addresses: set[str] = field(default_factory=set)


Reader = Callable[[RefusalNotice], object]


class RefusalLog:
    """Counts and prints the refusals of one process. Any thread may use it."""

    def __init__(self, say: Callable[[str], object] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say or terminal.say
        self._clock = clock
        self._changed = threading.Condition()
        self._unsaid: dict[Entrance, _Unsaid] = {}
        self._readers: tuple[Reader, ...] = ()
        self._thread: threading.Thread | None = None
        self._callers = 0
        self._last: tuple[Entrance, str, Refusal, float] | None = None

    def note(self, entrance: Entrance, at: str, caller: str, refusal: Refusal, callers: int = 1) -> None:
        """Never waits. Those that only hung up are not worth a line: port scans and load balancers do that."""
        if refusal is Refusal.CLOSED:
            return
        with self._changed:
            self._callers += callers
            self._last = (entrance, caller, refusal, self._clock())
            unsaid = self._unsaid.setdefault(entrance, _Unsaid(self._clock() - EVERY_SECONDS))
            unsaid.at, unsaid.caller, unsaid.refusal = at, caller, refusal
            unsaid.callers += callers
            if caller and len(unsaid.addresses) < MOST_ADDRESSES:
                unsaid.addresses.add(caller)
            self._wake()

    def at(self, entrance: Entrance, at: str) -> Callable[[str, ProofError], None]:
        """To be called with the address and the error of each that is refused there."""
        return lambda caller, error: self.note(entrance, at, caller, error.refusal)

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=REFUSALS_THREAD, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is free; the next refusal tries again
                return
            self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait = self.seconds_to_next()
                if wait is None:
                    self._thread = None
                    return
                if wait > 0:
                    self._changed.wait(wait)
            self.say_due()

    def seconds_to_next(self) -> float | None:
        """Until a line is due; None if there is nothing to say."""
        now = self._clock()
        due = [one.said_at + EVERY_SECONDS for one in self._unsaid.values() if one.callers]
        return max(0.0, min(due) - now) if due else None

    def say_due(self) -> None:
        """Write the lines whose time has come."""
        now = self._clock()
        with self._changed:
            due = [
                (entrance, one)
                for entrance, one in self._unsaid.items()
                if one.callers and now - one.said_at >= EVERY_SECONDS
            ]
            for entrance, _ in due:
                self._unsaid[entrance] = _Unsaid(now)
            readers = self._readers
        for entrance, one in due:
            notice = RefusalNotice(entrance, one.at, one.caller, one.refusal, one.callers, len(one.addresses))
            self._say(str(notice))
            for read in readers:
                read(notice)

    def subscribe(self, reader: Reader) -> Callable[[], None]:
        """Have ``reader`` called with every line as a value, on the thread that writes it; returns what ends that."""
        with self._changed:
            self._readers = (*self._readers, reader)

        def end() -> None:
            with self._changed:
                self._readers = tuple(one for one in self._readers if one is not reader)

        return end

    def summary(self) -> dict[str, Any] | None:
        """For a snapshot: all that were refused so far, and the last; None if there was none."""
        with self._changed:
            if self._last is None:
                return None
            entrance, caller, refusal, at = self._last
            ago = round(self._clock() - at, 1)
            return {
                "callers": self._callers,
                "last": {"entrance": entrance.value, "caller": caller, "why": refusal.value, "ago": ago},
            }


REFUSALS: Final = RefusalLog()
"""Of this process."""
