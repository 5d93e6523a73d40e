"""The machine that decides what must be decided once: the job id, the view, when a step is committed, the end.

It lives on server 0 (on worker 0 where there is no server)::

    FORMING   not every task has joined
    RUNNING   the view is fixed: these lives are the members
    ENDED     the job is over, well or with the first real error; whoever still speaks is told so
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.effects import Effect, Send
from lockstep.protocol.events import Broken, Event, LinkLost, LinkUp, PeerGone, Received, Tick
from lockstep.protocol.ids import INITIAL_STEP, ClusterShape, Incarnation, JobId, Step, TaskId
from lockstep.protocol.journal import Happening, Journal
from lockstep.protocol.machine import REPEAT_SECONDS, advance
from lockstep.protocol.messages import (
    Applied,
    Commit,
    Contributors,
    Done,
    End,
    Failed,
    Join,
    Member,
    MissingTask,
    Refused,
    Roster,
    Seal,
    View,
)
from lockstep.protocol.waits import Wait


class Phase(StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


class PhaseTrigger(StrEnum):
    COMPLETE = "the last task joined"
    END = "all workers finished, or a task failed"


PHASE_TRANSITIONS: Mapping[tuple[Phase, PhaseTrigger], Phase] = MappingProxyType(
    {
        (Phase.FORMING, PhaseTrigger.COMPLETE): Phase.RUNNING,
        (Phase.FORMING, PhaseTrigger.END): Phase.ENDED,
        (Phase.RUNNING, PhaseTrigger.END): Phase.ENDED,
    }
)


class CoordinatorMachine:
    """Membership, commits and the end of one job."""

    def __init__(
        self,
        shape: ClusterShape,
        job: JobId,
        token: str,
        journal: Journal,
        now: float,
        *,
        aggregate: int | None = None,
    ) -> None:
        """``aggregate``: a step is made of the first so many workers that seal it; None: of all of them."""
        self.shape = shape
        self.aggregate = aggregate
        self.dropped: dict[TaskId, int] = {}
        """How many steps were made without each worker (backup workers)."""
        self._sealed: dict[TaskId, Step] = {}
        self.decision = Contributors(INITIAL_STEP, ())
        """Who makes the newest step that was decided (backup workers)."""
        self.job = job
        self.phase = Phase.FORMING
        self.committed: Step = INITIAL_STEP - 1
        self.end: End | None = None
        self._token = token
        self._journal = journal
        self._since = now
        self._joined: dict[TaskId, Join] = {}
        self._applied = dict.fromkeys(shape.server_ids(), INITIAL_STEP - 1)
        self._done: dict[TaskId, Step] = {}
        self._findings: dict[TaskId, MissingTask] = {}
        self._roster_at = now

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received():
                return self._on_received(event, now)
            case PeerGone():
                return self._finish_badly(event.peer, self._steps_seen(), event.reason, now)
            case Broken():
                return self._finish_badly(event.culprit, event.step, event.reason, now)
            case LinkUp():
                return self._on_link_up(event)
            case LinkLost():
                return self._on_link_lost(event, now)
            case Tick():
                return self._on_tick(now)
            case _:
                return []

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        message = event.message
        if isinstance(message, Join):
            return self._on_join(event.peer, message, now)
        if not self._is_member(event.peer, event.incarnation):
            return []
        if self.end is not None and isinstance(message, (Applied, Done, Failed)):
            return [Send(event.peer, self.end)]
        match message:
            case Applied():
                return self._on_applied(event.peer, message, now)
            case Done():
                return self._on_done(event.peer, message, now)
            case Seal():
                return self._on_seal(event.peer, message, now)
            case Failed():
                culprit = TaskId.parse(message.culprit) if message.culprit else event.peer
                return self._finish_badly(culprit, message.step, message.reason, now)
            case _:
                return []

    def _is_member(self, peer: TaskId, incarnation: Incarnation) -> bool:
        join = self._joined.get(peer)
        return join is not None and join.incarnation == incarnation

    # -- forming --

    def _on_join(self, peer: TaskId, join: Join, now: float) -> list[Effect]:
        if self.end is not None:
            return [Send(peer, self.end)]
        known = self._joined.get(peer)
        if known is not None and known.incarnation == join.incarnation:
            return [Send(peer, self._view())] if self.phase is Phase.RUNNING else []
        refusal = self._why_refused(peer, join)
        if refusal is not None:
            return [Send(peer, Refused(refusal))]
        self._joined[peer] = join
        self._journal.record(now, Happening.JOINED, peer=peer)
        difference = self._first_different_setting(join)
        if difference is not None:
            return self._finish_badly(peer, INITIAL_STEP, difference, now)
        if len(self._joined) < len(self.shape.tasks()):
            return []
        self.phase = advance(PHASE_TRANSITIONS, self.phase, PhaseTrigger.COMPLETE)
        self._journal.record(now, Happening.VIEW)
        view = self._view()
        return [Send(task, view) for task in self.shape.tasks()]

    def _why_refused(self, peer: TaskId, join: Join) -> str | None:
        if join.token != self._token:
            return f"{peer} came with another job token; start every task with the same --job_token"
        known = self._joined.get(peer)
        if known is None:
            return None
        if self.phase is Phase.FORMING:
            return (
                f"{peer} is already taken by process {known.pid} on {known.host}; "
                f"give process {join.pid} on {join.host} a --task_index of its own"
            )
        return (
            f"the job runs already with another life of {peer} (process {known.pid} on {known.host}); "
            "end that job first, or give this task an index of its own"
        )

    def _first_different_setting(self, join: Join) -> str | None:
        reference_task, reference = next(iter(self._joined.items()))
        theirs = {s.name: s.value for s in join.settings}
        ours = {s.name: s.value for s in reference.settings}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                return (
                    f"{join.task} has {name}={theirs.get(name, '(none)')}, "
                    f"{reference_task} has {name}={ours.get(name, '(none)')}; start all tasks with the same value"
                )
        return None

    def _view(self) -> View:
        members = tuple(Member(str(t), self._joined[t].incarnation) for t in self.shape.tasks())
        return View(self.job, 1, members)

    def _on_link_up(self, event: LinkUp) -> list[Effect]:
        # A server has nothing to say at the end, so it would not ask: the word may have been lost with its former link.
        if self.end is None or not self._is_member(event.peer, event.incarnation):
            return []
        return [Send(event.peer, self.end)]

    def _on_link_lost(self, event: LinkLost, now: float) -> list[Effect]:
        # Before the view is fixed a task may come and go; afterwards only proof of its end counts.
        if self.phase is Phase.FORMING and event.peer in self._joined:
            del self._joined[event.peer]
            self._journal.record(now, Happening.LINK_LOST, peer=event.peer, cause=event.reason)
        return []

    def missing(self) -> tuple[TaskId, ...]:
        """The tasks that have not joined."""
        return tuple(task for task in self.shape.tasks() if task not in self._joined)

    def note_findings(self, findings: Sequence[MissingTask]) -> None:
        """What was found at the addresses of missing tasks; it goes out with the next roster."""
        self._findings = {TaskId.parse(finding.task): finding for finding in findings}

    def roster(self, now: float) -> Roster:
        """Who is missing, with what was found at its address."""
        return Roster(tuple(self._finding(task, now) for task in self.missing()))

    def _finding(self, task: TaskId, now: float) -> MissingTask:
        blank = MissingTask(str(task), "", "not looked for yet", now - self._since, 0)
        return self._findings.get(task, blank)

    # -- running --

    def _on_applied(self, peer: TaskId, message: Applied, now: float) -> list[Effect]:
        if peer not in self._applied:
            return []
        if message.step <= self.committed:
            known: list[Effect] = [Send(peer, Commit(self.committed))]
            return [*known, Send(peer, self.decision)] if self.decision.step > self.committed else known
        self._applied[peer] = max(self._applied[peer], message.step)
        complete = min(self._applied.values())
        if complete <= self.committed:
            return []
        self.committed = complete
        self._journal.record(now, Happening.COMMITTED, complete)
        return [Send(task, Commit(complete)) for task in self.shape.server_ids()]

    def _on_seal(self, peer: TaskId, seal: Seal, now: float) -> list[Effect]:
        """The first workers that seal a step make it; decided once, for all servers alike."""
        if self.aggregate is None or seal.step <= self.decision.step:
            return []
        self._sealed[peer] = seal.step
        here = sorted(task.index for task, step in self._sealed.items() if step == seal.step)
        if len(here) < self.aggregate:
            return []
        self.decision = Contributors(seal.step, tuple(here))
        for task in self.shape.worker_ids():
            if task.index not in here:
                self.dropped[task] = self.dropped.get(task, 0) + 1
                self._journal.record(now, Happening.DROPPED, seal.step, peer=task, cause="not among the first to seal")
        return [Send(task, self.decision) for task in self.shape.server_ids()]

    def _on_done(self, peer: TaskId, message: Done, now: float) -> list[Effect]:
        self._done[peer] = message.steps
        if len(self._done) < self.shape.workers:
            return []
        return self._finish(End(True, "", max(self._done.values()), ""), now)

    # -- the end --

    def _finish_badly(self, culprit: TaskId, step: Step, reason: str, now: float) -> list[Effect]:
        if self.end is not None:
            return []
        return self._finish(End(False, str(culprit), step, reason), now)

    def _finish(self, end: End, now: float) -> list[Effect]:
        self.phase = advance(PHASE_TRANSITIONS, self.phase, PhaseTrigger.END)
        self.end = end
        self._journal.record(now, Happening.ENDED, end.step, cause=end.reason)
        return [Send(task, end) for task in self.shape.tasks() if task in self._joined]

    def _steps_seen(self) -> Step:
        return self.committed + 1

    # -- time, and what others may ask --

    def _on_tick(self, now: float) -> list[Effect]:
        if self.phase is not Phase.FORMING or now < self._roster_at:
            return []
        self._roster_at = now + REPEAT_SECONDS
        roster = self.roster(now)
        return [Send(task, roster) for task in self._joined]

    def next_deadline(self) -> float | None:
        return self._roster_at if self.phase is Phase.FORMING else None

    def waits(self) -> list[Wait]:
        here = self.shape.coordinator
        if self.phase is Phase.FORMING:
            return [
                Wait(
                    here,
                    task,
                    "its joining",
                    INITIAL_STEP,
                    self._since,
                    self._roster_at,
                    self._finding(task, 0).finding,
                )
                for task in self.missing()
            ]
        return []

    def snapshot(self) -> dict[str, object]:
        return {
            "job": f"{self.job:016x}",
            "phase": self.phase.value,
            "committed": self.committed,
            "joined": [str(task) for task in self._joined],
            "missing": [str(task) for task in self.missing()],
            "done": {str(task): steps for task, steps in self._done.items()},
            "steps_without": {str(task): count for task, count in self.dropped.items()},
            "end": None
            if self.end is None
            else {"ok": self.end.ok, "culprit": self.end.culprit, "reason": self.end.reason},
        }

    def check(self) -> None:
        assert self.committed <= min(self._applied.values(), default=self.committed), "committed before applied"
        if self.phase is Phase.RUNNING:
            assert not self.missing(), "running without a task"
