"""The one loop of a task: it feeds events to the machines and carries out their effects, one event at a time.

Any thread may post an event; none of them ever waits for the loop. Nothing that the loop does may block: transfers are
started, messages queued, and heavy work is handed to the store's thread.

The loop has a thread. Waking it takes longer than most events do, and a step has several per bucket, so the thread
that brings such an event may carry it out at once (``do``) if nothing else is under way. Either way, a thread's events
are carried out in the order in which it brought them.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.protocol.core.causes import Cause, Reason, own_error
from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.errors import ProtocolError, RemoteProtocolError
from lockstep.protocol.core.events import Broken, Event, Tick
from lockstep.protocol.core.machine import WholeTask
from lockstep.protocol.core.timing import BOOKS_SECONDS
from lockstep.protocol.core.waits import Wait
from lockstep.runtime import phrases

Clock = Callable[[], float]
CarryOut = Callable[[Effect], None]
_Work = Callable[[], None]
_T = TypeVar("_T")
_JOIN_SECONDS = 5.0
LOOK_SECONDS = 0.25
"""How often the loop's thread checks when the next deadline is: an event that another thread carried out may have set
one. Deadlines are seconds away."""
ASK_SECONDS = 0.02
"""How often it does so while events come: to ask all machines takes longer than most events do."""


@dataclass(frozen=True, slots=True)
class Books:
    """The state of the machines at one moment; made on the loop, never changed, read by any thread."""

    waits: tuple[Wait, ...] = ()
    snapshot: Mapping[str, object] = field(default_factory=dict)


class TaskLoop:
    """Runs the machines of one task."""

    def __init__(self, machine: WholeTask, carry_out: CarryOut, clock: Clock = time.monotonic) -> None:
        self.machine = machine
        self.clock = clock
        self._carry_out = carry_out
        self._busy_with: Event | _Work | None = None
        self._busy_since = 0.0
        self._busy_ident = 0
        self._turn = threading.Lock()
        """The thread that holds it runs the machines. Only the loop's own thread ever waits for it."""
        self._count = threading.Lock()
        self._open = 1
        """Work that has not been done yet; the start of the machines comes first."""
        self._queue: queue.SimpleQueue[Event | _Work | None] = queue.SimpleQueue()
        self._next: deque[Event | _Work] = deque()
        self.books = Books()
        """At most half a second old, unless the loop is stuck."""
        self._books_at = 0.0
        self._ask_at = -math.inf
        """When the machines are asked for their next deadline again; never after one that they have named."""
        self._thread = threading.Thread(target=self._run, name=f"loop {machine.task.short}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Hand an event to the machines; returns at once."""
        self._put(event)

    def call(self, work: _Work) -> None:
        """Run something short on the loop's thread."""
        self._put(work)

    def do(self, item: Event | _Work) -> None:
        """Carry it out here and now if the loop has nothing to do, else as ``post`` and ``call``.

        For callers that hold no lock that an effect may need; they never wait. The main thread always posts: a signal
        may interrupt it at any point, and no event may be left half carried out.
        """
        with self._count:
            mine = not self._open and not _on_main_thread() and self._turn.acquire(blocking=False)
            self._open += 1
        if not mine:
            self._queue.put(item)
            return
        try:
            self._work_on(item)
        finally:
            self._turn.release()

    def then(self, item: Event | _Work) -> None:
        """Carry it out right after the event that is being handled. Only for code that already runs on the loop."""
        self._next.append(item)

    def _put(self, item: Event | _Work | None) -> None:
        with self._count:
            self._open += 1
        self._queue.put(item)

    @property
    def busy(self) -> tuple[float, str]:
        """When the loop began its current event, and which it is; (0, "") while it waits for the next."""
        item, since = self._busy_with, self._busy_since
        return (since, getattr(item, "__qualname__", type(item).__name__)) if item is not None else (0.0, "")

    @property
    def ident(self) -> int:
        """The thread that is handling an event, or was the last to do so."""
        return self._busy_ident or self._thread.ident or 0

    def queued(self) -> int:
        """How many events are waiting."""
        return self._queue.qsize()

    def read_books(self) -> Books:
        """Only for code that already runs on the loop."""
        return Books(tuple(self.machine.waits()), self.machine.snapshot())

    def _publish(self, now: float) -> None:
        self._books_at, self.books = now, self.read_books()

    def ask(self, read: Callable[[], _T], seconds: float) -> _T | None:
        """What ``read`` returns on the loop; None if the loop does not get to it in time. Not for the loop itself."""
        answer: list[_T] = []
        done = threading.Event()

        def work() -> None:
            answer.append(read())
            done.set()

        self.call(work)
        return answer[0] if done.wait(seconds) else None

    def settle(self, seconds: float) -> None:
        """Wait until everything posted so far has been carried out; do not call it from the loop."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            settled = threading.Event()
            self.call(settled.set)
            settled.wait(seconds)

    def stop(self) -> None:
        """End the thread once the queue is empty. May be called twice, and from the loop itself."""
        self._put(None)  # it stays held: nothing runs here from now on
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        with self._turn:
            for effect in self.machine.start(self.clock()):
                self._carry_out(effect)
            self._follow_up()
            self._done()
        while (item := self._next_item()) is not None:
            with self._turn:
                self._work_on(item)

    def _work_on(self, item: Event | _Work) -> None:
        now = self.clock()
        if now - self._books_at >= BOOKS_SECONDS:
            self._publish(now)
        self._busy_since, self._busy_ident = now, threading.get_ident()
        self._busy_with = item
        self._guarded(item)
        self._follow_up()
        self._busy_with = None
        self._done()

    def _follow_up(self) -> None:
        while self._next:
            self._busy_with = item = self._next.popleft()
            self._guarded(item)

    def _done(self) -> None:
        with self._count:
            self._open -= 1

    def _next_item(self) -> Event | _Work | None:
        if not self._queue.empty():
            return self._queue.get()  # this thread alone takes from it
        while True:
            patience = self._patience()
            if patience <= 0:
                self._ask_at = -math.inf
                with self._count:
                    self._open += 1
                return Tick()
            try:
                return self._queue.get(timeout=patience)
            except queue.Empty:
                continue

    def _patience(self) -> float:
        """Seconds until a deadline, or until the machines are asked whether there is one."""
        if (now := self.clock()) < self._ask_at:
            return self._ask_at - now
        with self._turn:
            deadline = self.machine.next_deadline()
            if (now := self.clock()) - self._books_at >= BOOKS_SECONDS:
                self._publish(now)
        patience = math.inf if deadline is None else deadline - self.clock()
        self._ask_at = now + min(patience, ASK_SECONDS)
        return min(patience, LOOK_SECONDS)

    def _guarded(self, item: Event | _Work) -> None:
        """A bug in one event must end the job with its reason, not this thread silently."""
        try:
            self._handle(item)
        except RemoteProtocolError as error:
            # The peer broke the rule, not this task, which only noticed.
            broken = Reason(Cause.FAILED, str(error), peer=str(self.machine.task))
            self._handle(Broken(error.peer, self.machine.role.step, broken))
        except ProtocolError as error:
            self._handle(self._broken(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job ends with it
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            self._handle(self._broken(phrases.error_in_the_loop(error, where)))

    def _broken(self, text: str) -> Broken:
        return Broken(self.machine.task, self.machine.role.step, own_error(text))

    def _handle(self, item: Event | _Work) -> None:
        if callable(item):
            item()
        else:
            self.handle(item)

    def handle(self, event: Event) -> None:
        """Give the machines an event now. Only for code that already runs on the loop's thread."""
        for effect in self.machine.handle(event, self.clock()):
            self._carry_out(effect)


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
