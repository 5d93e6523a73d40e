"""One end of a chain of waits, with all that the rules need to know of it; and the proof that a rule gives."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.diagnose.evidence import Evidence, Seen, Waiting, link_between
from lockstep.diagnose.views import LinkView, MonitorView, TaskView, TensorView
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.reach import NOT_ASKED
from lockstep.protocol.core.timing import HEARD_SECONDS, STUCK_SECONDS
from lockstep.protocol.core.waits import WaitKind

IDLE = 0.15
BUSY = 0.4
"""Shares of the time in which a thread had work."""
HELD_BACK = 4096
"""More bytes than heartbeats leave in the kernel for a moment."""
IN_VAIN = 3
"""A segment that was sent again this often, each time after twice as long, does not pass; on a slow link the second
try does."""

BEFORE_THE_MODEL = frozenset({TaskPhase.STARTING, TaskPhase.IMPORTING_TORCH, TaskPhase.CONNECTING})


@dataclass(frozen=True, slots=True)
class Proof:
    """A cause with what proves it. ``culprit`` and ``peer`` default to the two ends of the wait."""

    cause: Cause
    what: str
    evidence: tuple[str, ...] = ()
    culprit: str = ""
    peer: str = ""
    seconds: float = -1.0
    stack: tuple[str, ...] = ()
    remedy: str = ""
    """What to do, where that is not the same for all that has this cause."""


@dataclass(frozen=True, slots=True)
class WaitCase:
    """What lies between ``waiting.waiter`` and ``waiting.on``."""

    evidence: Evidence
    waiting: Waiting
    cycle: tuple[str, ...] = ()

    @property
    def waiter(self) -> str:
        return self.waiting.waiter

    @property
    def on(self) -> str:
        return self.waiting.on

    @property
    def seen(self) -> Seen:
        return self.evidence.tasks.get(self.on) or Seen(task=self.on, silence=NOT_ASKED, monitor_silence=NOT_ASKED)

    @property
    def view(self) -> TaskView | None:
        return self.seen.view

    @property
    def monitor(self) -> MonitorView | None:
        return self.seen.monitor

    @property
    def waiter_view(self) -> TaskView | None:
        return self.evidence.view(self.waiter)

    @property
    def step(self) -> int:
        return self.waiting.wait.step

    @property
    def bucket(self) -> int:
        return self.waiting.wait.bucket

    @property
    def forming(self) -> bool:
        """Whether the cluster is not complete yet."""
        return self.waiting.forming

    @property
    def is_starting(self) -> bool:
        """Whether the program of the one that is waited for has yet to come to its model, as one does that comes back:
        until then it looks at no request."""
        view, monitor = self.view, self.monitor
        if view is None:
            return False
        phases = {view.phase, "" if monitor is None else monitor.phase}
        if phases & BEFORE_THE_MODEL:
            return True
        return TaskPhase.COMPARING_SETTINGS in phases and not view.buckets and not view.served

    def links(self) -> tuple[LinkView | None, LinkView | None]:
        """The waiter's end of the link, and the other's."""
        return link_between(self.evidence, self.waiter, self.on)

    def link_is_sound(self) -> bool:
        """Both ends are up and have just heard from each other."""
        return all(link is not None and link.up and 0 <= link.heard < HEARD_SECONDS for link in self.links())

    def nobody_is_stuck(self) -> bool:
        """No callback of this link and no loop of its two tasks is blocked: what arrives is seen."""
        views = [view for view in (self.view, self.waiter_view) if view is not None]
        links = [link for link in self.links() if link is not None]
        return all(v.loop_busy < STUCK_SECONDS for v in views) and all(
            link.callback_seconds < STUCK_SECONDS for link in links
        )

    def tensor(self, view: TaskView | None, number: int, bucket: int, peer: str) -> TensorView | None:
        """What a task saw of the tensor that is waited for; ``bucket`` -1: of the request for it."""
        return None if view is None else view.tensor(self.waiting.kind.value, number, bucket, peer)

    @property
    def number(self) -> int:
        """The step of a gradient, the version of a parameter."""
        return self.step + 1 if self.waiting.kind is WaitKind.PARAMETER else self.step
