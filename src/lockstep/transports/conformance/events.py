"""The callbacks of an endpoint, in a list that can be waited for."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

PATIENCE: Final = 20.0
"""How long a case waits for something that must happen."""


class CaseFailed(AssertionError):  # noqa: N818  # reads as the finding it is
    """The transport broke a rule; the text says which one and how."""


class PeerHasEnded(CaseFailed):
    """A node in a separate process was called but is gone."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One callback: ``up``, ``sent``, ``failed``, ``arrived``, ``lent`` or ``lost``, of one link of a node.

    ``digest`` is that of the bytes at the very moment of the callback.
    """

    kind: str
    link: int
    transfer: int = 0
    text: str = ""
    note: bytes = b""
    nbytes: int = 0
    digest: int = 0


class EventLog:
    """All callbacks of one node in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._heard: list[Heard] = []

    def add(self, heard: Heard) -> None:
        with self._changed:
            self._heard.append(heard)
            self._changed.notify_all()

    def all(self, kind: str | None = None, link: int | None = None) -> list[Heard]:
        """All callbacks so far, or those of one kind or one link."""
        with self._changed:
            return self._matching(kind, link)

    def wait(self, kind: str, count: int = 1, link: int | None = None, seconds: float = PATIENCE) -> list[Heard]:
        """Wait until there are at least ``count`` of a kind, and return all of them."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._matching(kind, link)) >= count, seconds):
                seen = [(heard.kind, heard.transfer, heard.text) for heard in self._heard[-8:]]
                have = len(self._matching(kind, link))
                raise CaseFailed(
                    f"{self._name} received {have} of {count} '{kind}' within {seconds:g} s; last received: {seen}"
                )
            return self._matching(kind, link)

    def wait_settled(self, transfers: list[int], link: int | None = None, seconds: float = PATIENCE) -> dict[int, str]:
        """Wait until each transfer is reported as sent or failed; returns which, by number. Two reports fail."""
        with self._changed:
            if not self._changed.wait_for(lambda: set(transfers) <= set(self._settled(link)), seconds):
                missing = sorted(set(transfers) - set(self._settled(link)))
                raise CaseFailed(f"{self._name} was never notified of the end of transfers {missing[:8]}")
            settled = self._settled(link)
        doubled = sorted({number for number in transfers if settled.count(number) > 1})
        if doubled:
            raise CaseFailed(f"{self._name} was notified twice of the end of transfers {doubled[:8]}")
        kinds = {h.transfer: h.kind for h in self.all(link=link) if h.kind in ("sent", "failed")}
        return {number: kinds[number] for number in transfers}

    def _matching(self, kind: str | None, link: int | None) -> list[Heard]:
        return [h for h in self._heard if kind in (None, h.kind) and link in (None, h.link)]

    def _settled(self, link: int | None) -> list[int]:
        return [h.transfer for h in self._heard if h.kind in ("sent", "failed") and link in (None, h.link)]
