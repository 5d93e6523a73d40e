"""From connecting to the end: the state of one end of a link, the thread that serves it, and what it has counted.

Every transport's endpoint holds one. How the link is opened, and which frames it carries, is up to the transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from lockstep.transports.base import Counters, LinkDownError, LinkState

OPEN: Final = (LinkState.CONNECTING, LinkState.UP)
_OWNER_FAILED: Final = "a callback of the endpoint's owner raised an error"


class Lifecycle:
    """Goes from connecting to up, and from either to lost or closed, once."""

    def __init__(self, peer: str) -> None:
        self.state = LinkState.CONNECTING
        self.reason = ""
        """Why it ended."""
        self.lock = threading.Lock()
        """Guards the state, and the endpoint's transfers."""
        self.ended = threading.Event()
        self.numbers = count(1)
        self._peer = peer
        self._interrupt: Callable[[], object] = lambda: None
        self._thread = 0
        self._sent = [0, 0, 0]  # bytes, writes, loans; only the thread that sends changes them
        self._received = [0, 0, 0]  # the same; only the endpoint's thread changes them

    def run(self, talk: Callable[[], str], finish: Callable[[str], None]) -> None:
        """Serve the link on this thread. ``talk`` connects, reads to the end, and returns the reason for the end."""
        self._thread = threading.get_ident()
        reason = _OWNER_FAILED
        try:
            reason = talk()
        finally:
            finish(reason)

    @property
    def on_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def attach(self, interrupt: Callable[[], object]) -> None:
        """From now on ``interrupt`` ends whatever the endpoint's thread is waiting for."""
        self._interrupt = interrupt
        if self.state is LinkState.CLOSED:
            interrupt()

    def interrupt(self) -> None:
        self._interrupt()

    # --- changes of the state -----------------------------------------------------------------------------------

    def go_up(self) -> bool:
        """Whether the link is up now; it is not if it was closed in the meantime."""
        with self.lock:
            if self.state is LinkState.CONNECTING:
                self.state = LinkState.UP
            return self.state is LinkState.UP

    def close(self) -> LinkState:
        """This end closes the link; the state before."""
        return self._end(LinkState.CLOSED, "this end closed it")

    def lose(self, reason: str) -> bool:
        """The link broke; False if it had ended before."""
        return self._end(LinkState.LOST, reason) in OPEN

    def _end(self, state: LinkState, reason: str) -> LinkState:
        with self.lock:
            before = self.state
            if before in OPEN:
                self.state, self.reason = state, reason
        return before

    def refuse_if_over(self) -> None:
        """Raise if no transfer can be started; under the lock."""
        if self.state not in OPEN:
            raise LinkDownError(f"the link to {self._peer} is {self.state.value}: {self.reason}")

    # --- counting -----------------------------------------------------------------------------------------------

    def count_sent(self, nbytes: int, loan: bool) -> None:
        self._sent[0] += nbytes
        self._sent[2 if loan else 1] += 1

    def count_received(self, nbytes: int, loan: bool) -> None:
        self._received[0] += nbytes
        self._received[2 if loan else 1] += 1

    def counters(self) -> Counters:
        (sent, writes, loans), (received, writes_in, loans_in) = self._sent, self._received
        return Counters(sent, writes, received, writes_in, loans, loans_in)
