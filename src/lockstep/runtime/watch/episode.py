"""One time of being stuck, from the first long wait to the next progress: what was named, and since when."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import ENDS, Ends
from lockstep.protocol.core.timing import CHANGED_SECONDS

NOTICE_AGAIN_SECONDS = 10.0
"""How long until a notice is repeated; then twice as long, and so on."""
_BY_PATIENCE = tuple(Ends)


@dataclass(slots=True)
class Episode:
    """What a watchdog remembers while the job is stuck."""

    began: float
    stalled: bool = False
    _notices: int = 0
    _notice_at: float = 0.0
    _named: set[Cause] = field(default_factory=set)
    _seen: dict[Ends, float] = field(default_factory=dict)
    _verdict: tuple[Cause, frozenset[str]] | None = None
    _change: tuple[Cause, frozenset[str]] | None = None
    """A verdict other than the one that was given, and since when it has been found."""
    _change_at: float = 0.0

    def notice_is_due(self, now: float, cause: Cause) -> bool:
        """Whether to print a notice now: the first, one with another cause than before, or the next after a while."""
        if cause in self._named and now - self._notice_at < NOTICE_AGAIN_SECONDS * 2 ** (self._notices - 1):
            return False
        self._notices += cause in self._named or not self._named
        self._notice_at = now
        self._named.add(cause)
        return True

    def verdict_holds(self, now: float, cause: Cause, pair: frozenset[str]) -> bool:
        """Whether to give this verdict now. One that differs from the verdict before must be found for a while: the
        kernel's counters cover the last seconds, and those in which a link heals look like another fault."""
        found = cause, pair
        if self._verdict in (None, found) or ENDS[cause] is Ends.AT_ONCE:
            self._verdict = found
        elif self._change != found:
            self._change, self._change_at = found, now
        elif now - self._change_at >= CHANGED_SECONDS:
            self._verdict = found
        return self._verdict == found

    def stuck_since(self, now: float, progress_at: float, cause: Cause) -> float:
        """Since when the job is stuck for this cause, or for one that is given no longer.

        The minutes of an evaluation do not count against a link that breaks meanwhile, nor against a task that does not
        answer in time once.
        """
        place = _BY_PATIENCE.index(ENDS[cause])
        self._seen[ENDS[cause]] = now
        return max([progress_at, *(self._seen.get(longer, progress_at) for longer in _BY_PATIENCE[place + 1 :])])
