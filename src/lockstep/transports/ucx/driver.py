"""The thread that drives one link's NIXL agent: writes go out in order, and expected writes come in.

NIXL can only be polled. The thread sleeps while nothing is under way in either direction; while something is, it polls
at once and, when nothing has completed for a second, less and less often, so that a frozen peer costs little.
All calls of the agent are made here, and each releases the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from lockstep.transports.ucx.agent import Agent, AgentError

WINDOW: Final = 4
"""The number of writes in progress at the same time."""

_BUSY_SECONDS: Final = 1.0
_BUSY_PAUSE: Final = 5e-6
_IDLE_PAUSE: Final = 2e-3


def pause_after(seconds: float) -> float:
    """How long to wait before the next poll, when nothing has completed for ``seconds``.

    Never 0: a thread that only polls takes the interpreter's lock again before the threads of gRPC that wait for it
    have woken up. With any pause at all a small transfer took 1.2 ms, without one 5 to 9 ms.
    """
    return _BUSY_PAUSE if seconds < _BUSY_SECONDS else min(seconds / 1000, _IDLE_PAUSE)


def pause_beside_a_device(seconds: float) -> float:
    """As ``pause_after``, for a device that moves the bytes itself, so that polling only notices the end: a twentieth
    of the time taken so far. Constant polling would take the processor away from the device, if it is emulated
    (Soft-RoCE), and from anything else that computes there.
    """
    return min(max(seconds / 20, _BUSY_PAUSE), _IDLE_PAUSE)


class Outgoing(Protocol):
    """A transfer as the driver sees it."""

    cancelled: bool

    def is_ready(self) -> bool:
        """Whether the peer has announced where its region is."""

    def place(self) -> tuple[int, int, int, int]:
        """The peer's region, its address there, where the bytes are here, and how many."""

    def devices(self) -> tuple[int | None, int | None]:
        """The GPUs that hold the memory at this end and at the peer; None for ordinary memory."""


class Driver:
    """Drives an agent until it is stopped; then the agent is gone."""

    def __init__(
        self,
        name: str,
        agent: Agent,
        on_written: Callable[[Any], None],
        on_broken: Callable[[str], None],
        pause: Callable[[float], float] = pause_after,
    ) -> None:
        """``on_written``: all bytes of a transfer are in place. ``on_broken``: NIXL has lost the peer.
        ``pause``: how long to wait before the next poll, when nothing has completed for that many seconds."""
        self._agent = agent
        self._pause = pause
        self._on_written = on_written
        self._on_broken = on_broken
        self._wake = threading.Condition()
        self._jobs: deque[Callable[[Agent], None]] = deque()
        self._queue: deque[Any] = deque()
        self._flying: deque[tuple[Any, Any]] = deque()
        self._expected = 0
        self._stopped = False
        self._since = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[Agent], None]) -> None:
        """Run ``job`` with the agent on the driver's thread, before further writes."""
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def write(self, transfer: Outgoing) -> None:
        """Queue a transfer."""
        with self._wake:
            self._queue.append(transfer)
            self._wake.notify()

    def nudge(self) -> None:
        """Something that a queued transfer waits for has happened."""
        with self._wake:
            self._wake.notify()

    def expect(self, change: int) -> None:
        """The number of incoming transfers in progress changes by ``change``."""
        with self._wake:
            self._expected += change
            self._since = time.monotonic()
            self._wake.notify()

    def stop(self) -> None:
        """End the thread and the agent. Once this has returned, nothing from the peer lands any more."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    # --- on the driver's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except AgentError as error:
            self._on_broken(str(error))
        finally:
            self._flying.clear()
            self._agent.close()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: stop."""
        with self._wake:
            while not self._stopped:
                if self._jobs or self._may_begin():
                    return True
                if not self._flying and self._expected <= 0:
                    self._wake.wait()
                    self._since = time.monotonic()
                    continue
                self._wake.wait(self._pause(time.monotonic() - self._since))
                return not self._stopped
        return False

    def _may_begin(self) -> bool:
        if not self._queue or len(self._flying) >= WINDOW:
            return False
        head = self._queue[0]
        return bool(head.cancelled or (head.is_ready() and not self._overlaps(head)))

    def _overlaps(self, transfer: Outgoing) -> bool:
        """Whether bytes still in transit go to the same place: then this transfer has to wait for them."""
        region, begin, _, nbytes = transfer.place()
        for other, _ in self._flying:
            other_region, other_begin, _, other_nbytes = other.place()
            if other_region == region and begin < other_begin + other_nbytes and other_begin < begin + nbytes:
                return True
        return False

    def _step(self) -> None:
        with self._wake:
            job = self._jobs.popleft() if self._jobs else None
            begin = self._queue.popleft() if job is None and self._may_begin() else None
        if job is not None:
            job(self._agent)
        elif begin is not None:
            self._begin(begin)
        elif self._flying:
            self._look_at_the_oldest()
        else:
            self._agent.progress()

    def _begin(self, transfer: Any) -> None:
        self._since = time.monotonic()
        if transfer.cancelled:
            return
        _, remote, address, nbytes = transfer.place()
        handle = self._agent.begin_write(address, remote, nbytes, transfer.devices()) if nbytes else None
        self._flying.append((transfer, handle))

    def _look_at_the_oldest(self) -> None:
        transfer, handle = self._flying[0]
        if handle is None or self._agent.is_done(handle):
            self._flying.popleft()
            self._since = time.monotonic()
            self._on_written(transfer)
