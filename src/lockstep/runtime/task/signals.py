"""A task's signals: what a user or a batch system sends becomes an event of the machines, whatever its threads do.

Python runs signal handlers on the main thread, which may be in a long call, or importing torch. So a separate thread
reads the descriptor to which the interpreter writes the number of each signal at once. It notifies the job, and makes
sure that the process then ends in time: a main thread that waits for the job is notified of its end; one that is
elsewhere gets ``SystemExit``; one that cannot be interrupted is not waited for.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol

from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.events import Event, SignalCame
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.timing import ASIDE_SECONDS, SERVER_WIND_UP_SECONDS, TOLD_SECONDS, WIND_UP_SECONDS
from lockstep.protocol.phrases import left
from lockstep.runtime import phrases
from lockstep.runtime.monitor.exit import Action, Stopping
from lockstep.runtime.processes import STOP_SIGNALS
from lockstep.runtime.task.outcome import Outcome

if TYPE_CHECKING:
    from lockstep.runtime.watch.reporting import Publisher

HANDLED: Final = (*STOP_SIGNALS, signal.SIGUSR1)


_LOOK_SECONDS: Final = 0.02
_CLOSE: Final = 0


class Leaves(Protocol):
    """What signals need from a node."""

    task: TaskId
    outcome: Outcome | None
    winding_up: bool
    publisher: Publisher
    on_departure: Callable[[Departure], None]

    @property
    def sees_others_off(self) -> bool:
        """Whether other tasks depend on this one until they have left."""

    def post(self, event: Event) -> None: ...

    def abandon(self, outcome: Outcome) -> None: ...


class TaskSignals:
    """Handles the signals of this process from ``install`` to ``close``; call both on the main thread."""

    def __init__(
        self,
        task: TaskId,
        say: Callable[[str], None],
        grace: float,
        *,
        signums: Iterable[int] = HANDLED,
        interrupts_others: bool = True,
    ) -> None:
        """``grace``: how long a job may take to end after SIGTERM. ``interrupts_others``: the main thread is also
        interrupted when another task received the signal."""
        self._task = task
        self._signums = tuple(signums)
        self._say = say
        self._grace = grace
        self._interrupts_others = interrupts_others
        self.on_forced: Callable[[int], None] = lambda _code: None
        """Called just before a process that does not end on its own is ended."""
        self._stopping = Stopping(patience=float("inf"))
        self._node: Leaves | None = None
        self._kept: dict[int, object] = {}
        self._wakeup = -1
        self._own = 0
        """Signals that this class itself has sent, to interrupt the main thread."""
        self._exit_code: int | None = None
        """The exit code with which the main thread ends once it runs the handler."""
        self._seeing_out = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    # -- the main thread --

    def install(self, *, only_defaults: bool = False) -> None:
        """Handle the signals from now on, including those held back. ``only_defaults``: leave alone the signals that
        your script handles or ignores. Does nothing off the main thread, where no handler can be set."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in self._signums:
            if not only_defaults or signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                self._kept[signum] = signal.signal(signum, self._on_main_thread)
        os.register_at_fork(after_in_child=self._let_go_after_fork)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signums)

    def attach(self, node: Leaves) -> None:
        """Make this the node that receives the signals."""
        self._node = node
        node.on_departure = self._on_departure

    def close(self) -> None:
        """Restore the former handlers. May be called twice; from another thread it only ends the thread."""
        if self._closing.is_set() or not self._kept:
            self._closing.set()
            return
        self._closing.set()
        if threading.current_thread() is threading.main_thread():
            self._restore()
        self._writer.send(bytes((_CLOSE,)))
        if threading.current_thread() is not self._thread:
            self._thread.join(WIND_UP_SECONDS)
        self._reader.close()
        self._writer.close()

    def _restore(self) -> None:
        for signum, handler in self._kept.items():
            if signal.getsignal(signum) == self._on_main_thread:
                signal.signal(signum, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        signal.set_wakeup_fd(self._wakeup)

    def _let_go_after_fork(self) -> None:
        """Without this, a forked child would write its signals to its parent's descriptor."""
        if self._kept and not self._closing.is_set():
            self._closing.set()
            self._restore()

    def _on_main_thread(self, signum: int, _frame: FrameType | None) -> None:
        code, self._exit_code = self._exit_code, None
        if code is not None:
            raise SystemExit(code)
        if self._closing.is_set():
            return
        # An event loop in your script may have replaced our descriptor with its own.
        other = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if other != self._writer.fileno():
            signal.set_wakeup_fd(other, warn_on_full_buffer=False)
            self._writer.send(bytes((signum,)))

    # -- its own thread --

    def _run(self) -> None:
        while not self._closing.is_set():
            for signum in self._reader.recv(256):
                if signum == _CLOSE:
                    return
                self._take(signum)

    def _take(self, signum: int) -> None:
        if signum not in self._kept:
            return
        if self._own:
            self._own -= 1
        elif signum == signal.SIGUSR1:
            self._write_files()
        else:
            match self._stopping.on_signal(signum, time.monotonic()):
                case Action.ASK:
                    threading.Thread(target=self._leave, args=(Departure(signum),), name="leaving", daemon=True).start()
                case Action.KILL:
                    assert self._stopping.signum is not None
                    self._force(128 + self._stopping.signum)

    def _write_files(self) -> None:
        if self._node is None:
            self._say("SIGUSR1 came too early: this task is still starting, so there is nothing to write yet")
        else:
            self._node.publisher.dump("SIGUSR1", tells=True)

    def _leave(self, departure: Departure) -> None:
        node = self._node
        if node is None:
            self._say(phrases.left_alone(str(self._task), left(departure)))
        elif node.outcome is None:
            node.post(SignalCame(departure))
            seconds = TOLD_SECONDS if departure.ends_the_job else self._grace
            if not self._wait(lambda: node.outcome is not None, seconds):
                reason = Reason(Cause.STOPPED, left(departure))
                node.abandon(Outcome(False, str(node.task), -1, reason, departure=departure, alone=True))
        self._see_out(departure.exit_code)

    def _on_departure(self, departure: Departure) -> None:
        """A signal to this task or to another one has ended the job; must not block."""
        if self._stopping.signum is None and self._interrupts_others:
            threading.Thread(target=self._see_out, args=(departure.exit_code,), name="leaving", daemon=True).start()

    def _see_out(self, code: int) -> None:
        """Make the main thread leave this process."""
        if not self._seeing_out.acquire(blocking=False):
            return
        node = self._node
        stays = node is not None and node.sees_others_off
        if self._closing.wait(0.0 if node is None else ASIDE_SECONDS):
            return
        if node is None or not node.winding_up:
            self._exit_code = code
            self._own += 1
            signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._kept)))
        if not self._closing.wait(SERVER_WIND_UP_SECONDS if stays else WIND_UP_SECONDS):
            self._force(code)

    def _force(self, code: int) -> None:
        self.on_forced(code)
        os._exit(code)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._closing.wait(_LOOK_SECONDS)
        return condition()
