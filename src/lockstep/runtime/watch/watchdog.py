"""Looks for waits that are longer than usual, finds out why, and reports it; on its own thread in every task.

The coordinator looks on behalf of all and sends each task its report. A task that does not receive one looks itself.
While steps go on as usual, all that runs here is one short look at counters, twice a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.collect import collect, fetch_stack
from lockstep.diagnose.evidence import Ended, Evidence, Seen
from lockstep.diagnose.monitor_view import from_description
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.diagnose.views import TaskView
from lockstep.diagnose.witness import with_witnesses
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import LOSSES, Cause, Reason, ReportKind, Source
from lockstep.protocol.core.endings import NOTICED, seconds_allowed
from lockstep.protocol.core.events import Broken, Event, PeerGone
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Printed, Report
from lockstep.protocol.core.reach import NOT_ASKED
from lockstep.protocol.core.timing import (
    AFTER_COORDINATOR_SECONDS,
    ASK_ALL_SECONDS,
    ASK_STACK_SECONDS,
    COORDINATOR_UNHEARD_SECONDS,
    FIRST_STEPS_FACTOR,
    FIRST_STEPS_NOTICE_SECONDS,
    HEARTBEAT_SECONDS,
    NOTICE_SECONDS,
    OWN_LOOK_SECONDS,
    PATIENCE_SECONDS,
    STOPPED_SECONDS,
    TICK_SECONDS,
    VERDICT_AGAIN_SECONDS,
    VERDICT_SECONDS,
    WATCHDOG_JOIN_SECONDS,
)
from lockstep.protocol.core.waits import WaitKind
from lockstep.runtime import phrases
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.pages import NO_PAGES, Pages
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.watch.episode import Episode
from lockstep.runtime.watch.printing import Printing
from lockstep.runtime.watch.reporting import Publisher
from lockstep.runtime.watch.snapshot import Shown, snapshot_of
from lockstep.runtime.watch.status import STEPS_TO_KNOW
from lockstep.transports.guard import Guard
from lockstep.version import __version__

STARTING_LOOK_PER_TASK = 0.1
"""While a cluster starts, its machines are busy: the larger it is, the longer the time between looks."""
STARTING_PATIENCE_PER_TASK = 0.5
OWN_LOOK_PER_TASK = 0.1
"""The coordinator of a large cluster needs longer for a look, and the more so if all others look as well."""
SMALL_CLUSTER = 8
PENDING_TICK = 0.1
"""How often it looks whether another task has printed a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """How a watchdog behaves. Tests scale the times; users set ``--on_stall`` and ``--stall_after``."""

    on_stall: str = "abort"
    """``report``: report it and keep waiting. ``abort``: end the job at a verdict that cannot heal, and at a stall."""
    pages: Pages = NO_PAGES
    """Who is called besides."""
    tick: float = TICK_SECONDS
    notice: float = NOTICE_SECONDS
    """Shorter waits are never reported."""
    first_steps: float = FIRST_STEPS_NOTICE_SECONDS
    """The same, before it is known how long a step takes."""
    patience: float = PATIENCE_SECONDS
    ask: float = ASK_ALL_SECONDS
    """How long to wait for an answer when all tasks are asked."""


class Watched(Shown, Protocol):
    """What a watchdog needs of its node."""

    def report_printed(self) -> None: ...

    @property
    def cluster(self) -> ClusterSpec: ...

    @property
    def leaving(self) -> bool: ...

    @property
    def forming(self) -> bool: ...

    def post(self, event: Event) -> None: ...

    def beat(self) -> None: ...

    def abandon(self, outcome: Outcome) -> None: ...

    def can_recover(self, task: TaskId) -> bool:
        """Whether the job survives the loss of this task."""


class Watchdog:
    """One task's watchdog."""

    def __init__(self, node: Watched, settings: WatchSettings, publisher: Publisher) -> None:
        self._node = node
        self._settings = settings
        self._publisher = publisher
        self._printing = Printing(node, publisher)
        self._episode: Episode | None = None
        self._said: dict[tuple[Cause, frozenset[str]], float] = {}
        self._report_at = 0.0
        self._reported = Cause.UNKNOWN
        """What the coordinator reported last."""
        self._started = time.monotonic()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._ended = False
        self._paused_at = -VERDICT_SECONDS
        """When this task last found that it had been stopped itself."""
        self._idle_since = math.inf
        """Since when its thread waits for work; infinity while it does some."""
        self._look_at = 0.0
        self._beat_at = 0.0
        self._guard = Guard("the watchdog", publisher.say)
        self._thread = threading.Thread(target=self._run, name=f"watchdog {node.task.short}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread once all its reports are out."""
        self._closing = True
        self._inbox.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(WATCHDOG_JOIN_SECONDS)
        self._publisher.close()

    # -- called by other threads --

    def heard(self, message: Report | Printed) -> None:
        """The coordinator has found something out, or printed it; on a link's thread, which must not wait."""
        if isinstance(message, Printed):
            self._inbox.put(lambda: self._printing.heard_printed(message))
            return
        self._report_at = time.monotonic()
        self._inbox.put(lambda: self._told(message))

    def note_replica(self, *, whole: bool) -> None:
        """Not everything has a second home now, or has one again; on the loop's thread, which waits for no file."""
        self._inbox.put(lambda: self._publisher.note_replica(whole=whole))

    def _told(self, message: Report) -> None:
        diagnosis = self._printing.told(message)
        if diagnosis is not None and diagnosis.verdict is not None:
            self._reported = diagnosis.verdict.cause

    def job_ends(self, culprit: str, step: int, reason: Reason) -> None:
        """The job is about to end badly; on the loop's thread. The others receive the reason before the end."""
        recent, ended = time.monotonic() - self._report_at < 1.0, self._ended
        self._ended = True
        if ended or reason.reported:
            return
        if recent:
            self._printing.will_explain(culprit)
            return
        self._printing.will_explain(culprit)
        diagnosis = analyse(self._evidence_at_hand(Ended(culprit, step, reason)))
        if self._leads():
            self._publisher.tell_peers(ReportKind.VERDICT, diagnosis, self._node.peers)
        brief = self._was_stopped() and not self._leads()
        self._inbox.put(lambda: self._printing.found(ReportKind.VERDICT, diagnosis, brief=brief))

    def _was_stopped(self) -> bool:
        """Whether this task was stopped itself just now: then the others have reported it, and what this task finds
        only follows from it. A thread that waits for less than a tick is away longer only if its process is."""
        now = time.monotonic()
        if now - self._idle_since >= STOPPED_SECONDS:
            self._paused_at = now
        return now - self._paused_at < VERDICT_SECONDS

    def report(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        """Print and write what was found elsewhere than here; returns at once."""
        self._inbox.put(lambda: self._printing.found(kind, diagnosis))

    def explains(self, outcome: Outcome) -> bool:
        """Whether a report tells why the job ended like this, so that nothing more need be said."""
        return self._printing.explains(outcome)

    def dump(self, why: str) -> None:
        """Write this task's files; from any thread that may block."""
        self._publisher.dump(why)

    # -- its own thread --

    def _run(self) -> None:
        # A task that leaves still waits, for seconds, until the report is printed; its links stay open for that.
        while not self._closing or self._printing.pending or not self._inbox.empty():
            tick = min(PENDING_TICK, self._settings.tick) if self._printing.pending else self._settings.tick
            self._idle_since = time.monotonic()
            work: Callable[[], None] | None = None
            with contextlib.suppress(queue.Empty):
                work = self._inbox.get(timeout=tick)
            self._was_stopped()
            self._idle_since = math.inf
            if work is not None:
                self._guard.passes(work)
            elif not self._closing:
                self._guard.passes(lambda: self._tick(time.monotonic()))
            self._guard.passes(lambda: self._printing.settle(time.monotonic()))

    def _tick(self, now: float) -> None:
        node = self._node
        node.sampler.sample(now)
        if now - self._beat_at >= HEARTBEAT_SECONDS:
            self._beat_at = now
            node.beat()
            self._publisher.folder.hold()
        if node.leaving:
            return
        longest = self._longest_wait(now)
        if longest is None:
            if self._episode is not None:
                self._episode = None
                self._reported = Cause.UNKNOWN
                self._printing.forget()
                node.sampler.forget_kernel()
            return
        node.sampler.sample_kernel(now)
        if self._episode is None:
            self._episode = Episode(now)
        if now >= self._look_at and self._decides(now, self._episode):
            self._look(now, self._episode)
            # In a large cluster, or where many tasks do not answer, a look takes long: leave time between looks.
            pause = STARTING_LOOK_PER_TASK * self._tasks() if self._starting() else 0.0
            self._look_at = time.monotonic() + max(pause, min(5.0, time.monotonic() - now))

    def threshold(self) -> float:
        """How long a wait must be before it is looked into."""
        if self._node.forming:
            return self._settings.notice
        return self._node.sampler.usual(self._settings.notice, self._settings.first_steps)

    def _longest_wait(self, now: float) -> float | None:
        """The longest wait of this task, if it is longer than usual."""
        node, settings = self._node, self._settings
        moved = now - max(self._started, node.sampler.last_step_at())
        if moved < min(settings.notice, settings.first_steps):
            return None  # steps are short: no need to find out what is usual
        threshold = self.threshold()
        if moved < threshold:
            return None
        doing, _, since = node.main.now()
        longest = 0.0
        for wait in node.loop.books.waits:
            seconds = now - wait.since
            if wait.kind is WaitKind.PARAMETER:
                # A worker asks early; it waits only once its training thread has reached the wait.
                seconds = min(seconds, now - since) if doing is Doing.WAITING else 0.0
            longest = max(longest, seconds)
        store = node.store_status
        if store is not None and store.since:
            # A server that updates waits for no task, but all tasks wait for it.
            longest = max(longest, now - store.since)
        return longest if longest >= threshold else None

    def _decides(self, now: float, episode: Episode) -> bool:
        """Whether this task looks itself: it is the coordinator, or the coordinator is silent."""
        if self._leads():
            return True
        if self._starting() and now - episode.began < self._patience_while_starting():
            return False
        if not self._hears_coordinator(now):
            return True
        if self._report_at >= episode.began - OWN_LOOK_SECONDS:
            # The coordinator has reported this, which holds unless it fails to end what it should.
            return now - self._node.sampler.progress_at >= self._allowed(self._reported)
        return now - episode.began >= OWN_LOOK_SECONDS + OWN_LOOK_PER_TASK * self._more_than_few()

    def _starting(self) -> bool:
        """The cluster forms, or is a large one in its first steps, in which all tasks are as busy."""
        return self._node.forming or (self._tasks() > SMALL_CLUSTER and self._first_steps())

    def _patience_while_starting(self) -> float:
        """In a large cluster every task misses some other at first; if all asked all, nothing else would get done."""
        return STARTING_PATIENCE_PER_TASK * self._more_than_few()

    def _more_than_few(self) -> int:
        """How many tasks this cluster has more than a small one."""
        return max(0, self._tasks() - SMALL_CLUSTER)

    def _tasks(self) -> int:
        """Of the whole cluster: a worker is linked only with the servers, but all tasks start at the same time."""
        return len(self._node.cluster.shape.tasks())

    def _leads(self) -> bool:
        return self._node.task == self._node.coordinator

    def _hears_coordinator(self, now: float) -> bool:
        keeper = self._node.peers.get(self._node.coordinator)
        return keeper is not None and keeper.linked and keeper.seconds_unheard(now) < COORDINATOR_UNHEARD_SECONDS

    def _look(self, now: float, episode: Episode) -> None:
        forming = self._node.forming
        diagnosis = self._with_stack(self.evidence())
        verdict = diagnosis.verdict
        if verdict is None or self._node.leaving or forming != self._node.forming:
            return
        progress_at = self._node.sampler.progress_at
        still = time.monotonic() - episode.stuck_since(now, progress_at, verdict.cause)
        recovers = verdict.cause in LOSSES and self._node.can_recover(TaskId.parse(verdict.culprit))
        allowed = self._allowed(Cause.UNKNOWN if recovers else verdict.cause)
        if self._ends_job(verdict) and verdict.heals and not (forming or math.isinf(allowed)):
            verdict = replace(verdict, left=max(0.0, allowed - still))
            diagnosis = replace(diagnosis, verdict=verdict)
        patient = verdict.cause in NOTICED or verdict.cause is Cause.NEVER_STARTED or not verdict.proven
        if recovers:
            # Nor does it end the job at once: not every task knows yet that the lost one is waited for, or is back.
            patient = True
            self._report_loss(verdict)
        if not patient:
            if episode.verdict_holds(now, verdict.cause, verdict.pair()):
                self._say_verdict(now, diagnosis, verdict)
        elif episode.notice_is_due(now, verdict.cause):
            self._notice(diagnosis)
        if self._node.machine.awaited:
            return  # a lost task is waited for, which every task prints; --rejoin_timeout ends that
        if still >= allowed and not (episode.stalled or self._node.forming):
            episode.stalled = True
            self._say(ReportKind.STALL, diagnosis, verdict)
            self._end(Source.STALL, verdict)

    def _report_loss(self, verdict: Verdict) -> None:
        """An incarnation is over, but the job is not: the machines know what to do, unless they know already."""
        culprit = TaskId.parse(verdict.culprit)
        keeper = self._node.peers.get(culprit)
        reason = Reason(verdict.cause, phrases.without_name(verdict.what, culprit), Source.VERDICT)
        if keeper is not None and verdict.proven:
            keeper.give_up_silent(reason)
        if keeper is not None and not keeper.linked and keeper.known_life:
            self._node.post(PeerGone(culprit, reason, keeper.known_life))

    def _allowed(self, cause: Cause) -> float:
        """How long this cause may hold up the job: what the user set, or longer where steps take longer; in its first
        steps a job may load and tune."""
        cluster = self._node.cluster
        late = 0.0 if self._leads() or not self._hears_coordinator(time.monotonic()) else AFTER_COORDINATOR_SECONDS
        least = cluster.startup_timeout if self._first_steps() else 2 * self.threshold()
        return late + seconds_allowed(cause, max(cluster.stall_after, least), max(cluster.user_code_timeout, least))

    def _first_steps(self) -> bool:
        """Too few steps are done to know how long one takes."""
        return len(self._node.sampler.step_seconds()) < STEPS_TO_KNOW

    def _say_verdict(self, now: float, diagnosis: Diagnosis, verdict: Verdict) -> None:
        key = (verdict.cause, verdict.pair())
        if now - self._said.get(key, -VERDICT_AGAIN_SECONDS) < VERDICT_AGAIN_SECONDS:
            return
        self._said[key] = now
        self._say(ReportKind.VERDICT, diagnosis, verdict)
        if not verdict.heals:
            self._end(Source.VERDICT, verdict)

    def _notice(self, diagnosis: Diagnosis) -> None:
        if not self._node.forming:  # then the search prints who is missing
            if self._leads():
                self._publisher.tell_peers(ReportKind.NOTICE, diagnosis, self._node.peers)
            self._publisher.say_notice(diagnosis)
        self._publisher.note(ReportKind.NOTICE, diagnosis)

    def _say(self, kind: ReportKind, diagnosis: Diagnosis, verdict: Verdict) -> None:
        ends = self._ends_job(verdict) and (kind is ReportKind.STALL or not verdict.heals)
        diagnosis = replace(diagnosis, ends=ends)
        if self._leads():
            self._publisher.tell_peers(kind, diagnosis, self._node.peers)
        self._printing.found(kind, diagnosis)

    def _ends_job(self, verdict: Verdict) -> bool:
        """Whether the job ends where this does not heal."""
        if self._settings.on_stall != "abort" or self._node.machine.awaited:
            return False
        # This may be another incarnation of a task that the job waits for; the coordinator knows.
        may_return = verdict.cause is Cause.LEFTOVER_SERVER and self._node.forming
        return not (may_return and self._node.can_recover(TaskId.parse(verdict.culprit)))

    def _end(self, source: Source, verdict: Verdict) -> None:
        if not self._ends_job(verdict):
            return
        reason = Reason(verdict.cause, verdict.what, source, verdict.peer, verdict.host, verdict.pid)
        culprit = TaskId.parse(verdict.culprit)
        coordinator = self._node.peers.get(self._node.coordinator)
        self._node.post(Broken(culprit, verdict.step, reason))
        if coordinator is not None and coordinator.seconds_unheard(time.monotonic()) >= COORDINATOR_UNHEARD_SECONDS:
            self._node.abandon(Outcome(False, verdict.culprit, verdict.step, reason))

    # -- evidence --

    def evidence(self) -> Evidence:
        """The snapshots of all tasks, collected now."""
        cluster = self._node.cluster
        me = str(self._node.task)
        addresses = {str(task): cluster.address_of(task) for task in self._asked()}
        found = collect(addresses, self._settings.ask, {me: self._own_view()})
        if not self._node.forming and not self._asks_few():
            found = with_witnesses(found, me)
        # Asking takes seconds where one does not answer; meanwhile this task may have heard from it, or still has not.
        return self._evidence({**found, me: replace(found[me], view=self._own_view())})

    def _own_view(self) -> TaskView:
        return read_task(json.dumps(snapshot_of(self._node)).encode())

    def _asked(self) -> Sequence[TaskId]:
        node = self._node
        return (node.task, *node.peers) if self._asks_few() else node.cluster.shape.tasks()

    def _asks_few(self) -> bool:
        """While a large cluster starts, all are too busy to be asked by all: each asks only those that it is linked
        with, and the coordinator asks all."""
        large = self._tasks() > SMALL_CLUSTER
        return large and bool(self._node.peers) and self._starting() and not self._leads()

    def look_now(self) -> Diagnosis:
        """What can be proven at this moment; for a thread that may wait."""
        return self._with_stack(replace(self.evidence(), floor=0.0))

    def _evidence(self, found: Mapping[str, Seen]) -> Evidence:
        threshold = self.threshold()
        patience = max(self._settings.patience, threshold)
        if self._first_steps():
            patience *= FIRST_STEPS_FACTOR
        return Evidence(
            tasks=found,
            asker=str(self._node.task),
            version=__version__,
            floor=min(threshold, self._settings.notice) * 0.75,
            patience=patience,
            time=time.time(),
        )

    def _with_stack(self, evidence: Evidence) -> Diagnosis:
        """Analyse; where the culprit does not answer, its monitor provides its stack."""
        diagnosis = analyse(evidence)
        verdict = diagnosis.verdict
        seen = None if verdict is None else evidence.tasks.get(verdict.culprit)
        if verdict is None or seen is None or seen.view is not None or seen.monitor is None or seen.monitor.exited:
            return diagnosis
        stack = fetch_stack(seen.address, ASK_STACK_SECONDS)
        if not stack:
            return diagnosis
        # Once more: what it says of the culprit has the line then.
        known = replace(seen, monitor=replace(seen.monitor, stack=stack))
        again = analyse(replace(evidence, tasks={**evidence.tasks, verdict.culprit: known}))
        if again.verdict is None:
            return replace(diagnosis, verdict=replace(verdict, stack=stack))
        return replace(again, verdict=replace(again.verdict, stack=again.verdict.stack or stack))

    def _evidence_at_hand(self, end: Ended) -> Evidence:
        """What this task knows without asking any other: on the loop's thread nothing may wait."""
        own = read_task(json.dumps(snapshot_of(self._node, on_loop=True)).encode())
        found = {str(self._node.task): Seen(task=str(self._node.task), view=own)}
        for peer, keeper in self._node.peers.items():
            described = keeper.finding.description
            monitor = None if described is None else from_description(described)
            found[str(peer)] = Seen(task=str(peer), address=keeper.front, monitor=monitor, silence=NOT_ASKED)
        return replace(self._evidence(found), end=end, floor=0.0)


__all__ = ["WatchSettings", "Watchdog", "Watched"]
