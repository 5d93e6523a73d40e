"""A small job with second homes, one event at a time: the real machines of ``protocol/replication``.

Which of all possible events comes next is drawn from a seed: messages keep their order only on one link in one
direction; proofs, restarts and the work of stores and workers come at any moment. Disturbances come at chosen events
(``search.py``), so every moment of a run can be tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.errors import ProtocolError
from lockstep.protocol.core.events import LinkLost, LinkUp, PeerGone, Tick
from lockstep.protocol.core.ids import BucketId, ClusterShape, Incarnation, Role, TaskId
from lockstep.protocol.replication.replica_events import (
    Compute,
    MakeCopy,
    MakeVersion,
    MessageHeard,
    ReplicaEffect,
    ReplicaEvent,
    Say,
    SendCopy,
    SendValue,
    TakeCopy,
    TaskEnds,
)
from lockstep.protocol.replication.replica_messages import ReplicaMessage, Stamped, VersionOf
from lockstep.protocol.replication.replicated_server import ReplicatedServer
from lockstep.protocol.replication.replicated_worker import ReplicatedWorker
from lockstep.sim.replicas.judge import ReplicaJudge
from lockstep.sim.replicas.store import ReplicaStore, computed
from lockstep.sim.violation import Rule, Violation, with_story

TRACE_LENGTH = 80
MOST_EVENTS = 20_000
Pair = tuple[TaskId, TaskId]
_Choice = tuple[Callable[[Any], None], Any]
"""Something that can happen now, and to what."""


class Harm(StrEnum):
    """What happens at an event."""

    KILL = "kill"
    """SIGKILL; what it had sent still arrives."""
    KILL_LOSING = "kill, losing"
    """SIGKILL, and what it had sent is lost."""
    CUT = "cut"
    """From now on nothing passes between the first two servers."""
    BREAK = "break"
    """All links of the task break, lose what is on its way, and are opened again."""


@dataclass(frozen=True, slots=True)
class HarmPoint:
    """``task`` is harmed when it has handled its ``event``-th event, before or after the effects are carried out."""

    task: TaskId
    event: int
    harm: Harm = Harm.KILL
    effects_done: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaScenario:
    """One run."""

    seed: int = 0
    servers: int = 2
    workers: int = 2
    buckets: int = 3
    steps: int = 3
    digest_every: int = 2
    harms: tuple[HarmPoint, ...] = ()
    servers_return: bool = True
    """A server that was killed is started again; workers always are."""
    proof_passes: bool = True
    """Servers that are cut from each other still get proof of each other's end (from their monitors, say)."""

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(self.servers, self.workers)


class ReplicaMaker:
    """Makes the machines. A test that plants a defect overrides one method."""

    def server(self, scenario: ReplicaScenario, task: TaskId, life: Incarnation) -> ReplicatedServer:
        return ReplicatedServer(task, life, scenario.shape, scenario.buckets, digest_every=scenario.digest_every)

    def worker(self, scenario: ReplicaScenario, task: TaskId, life: Incarnation) -> ReplicatedWorker:
        return ReplicatedWorker(task, life, scenario.buckets, scenario.steps)

    def store(self) -> ReplicaStore:
        return ReplicaStore()


@dataclass(slots=True)
class ReplicaTask:
    """One incarnation of a task."""

    name: TaskId
    life: Incarnation
    machine: ReplicatedServer | ReplicatedWorker
    store: ReplicaStore
    work: deque[Callable[[], ReplicaEvent]] = field(default_factory=deque)
    """What its store or its training loop still has to do."""
    alive: bool = True
    outcome: TaskEnds | None = None


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """How a run ended."""

    ok: bool
    events: int
    reasons: tuple[str, ...]
    causes: frozenset[Cause]
    """Of tasks that did not end well."""
    numbers: tuple[tuple[BucketId, int], ...]
    moments: tuple[tuple[TaskId, int], ...]
    """Every event before the end was decided: its task, and its number there."""
    struck: int
    takeovers: int


class ReplicaWorld:
    """One run."""

    def __init__(self, scenario: ReplicaScenario, maker: ReplicaMaker | None = None) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.tasks: dict[TaskId, ReplicaTask] = {}
        self.judge = ReplicaJudge(scenario.buckets, scenario.steps, self.tasks)
        self._maker = maker or ReplicaMaker()
        self._random = Random(scenario.seed)
        self._lives = 0
        self._queues: dict[Pair, deque[ReplicaEvent]] = {}
        self._news: list[tuple[TaskId, PeerGone | LinkLost]] = []
        """What a task learns otherwise than over a link, at any time."""
        self._starts: list[TaskId] = []
        self._unlinked: list[Pair] = []
        self._cut: set[Pair] = set()
        self._events: dict[TaskId, int] = dict.fromkeys(scenario.shape.tasks(), 0)
        self._harms = {(point.task, point.event, point.effects_done): point for point in scenario.harms}
        self._moments: list[tuple[TaskId, int]] = []
        self._trace: deque[tuple[int, TaskId, ReplicaEvent | Harm]] = deque(maxlen=TRACE_LENGTH)
        self._done = 0
        self._struck = 0
        for task in scenario.shape.tasks():
            self._start(task)

    # -- a run --

    def run(self) -> ReplicaRun:
        """Play to the end; Violation if a rule is broken or nothing can happen any more."""
        try:
            while not self._over():
                chosen = self._next()
                if chosen is None:
                    break
                happen, what = chosen
                happen(what)
                if self._done > MOST_EVENTS:
                    raise Violation(Rule.NO_END, f"no end after {MOST_EVENTS} events")
            return self._result()
        except (AssertionError, ProtocolError) as broken:
            raise with_story(broken, self.story()) from broken

    def _over(self) -> bool:
        """Every worker that belonged to the job knows its end; one that starts now may still ask how it ended."""
        workers = [task for task in self.tasks.values() if task.name.role is Role.WORKER]
        outcomes = [task.outcome for task in workers if task.outcome is not None]
        if not outcomes or any(task.alive and task.machine.viewing.number for task in workers):
            return False
        job_ended = any(outcome.end is not None for outcome in outcomes)
        return not job_ended or (len(outcomes) == len(workers))

    def _result(self) -> ReplicaRun:
        outcomes = [task.outcome for task in self.tasks.values() if task.outcome is not None]
        workers = [task.outcome for task in self.tasks.values() if task.name.role is Role.WORKER]
        ok = all(outcome is not None and outcome.end is not None and outcome.end.ok for outcome in workers)
        if ok:
            self.judge.completed()
        reasons = tuple(sorted({outcome.reason.text for outcome in outcomes if outcome.reason.text}))
        causes = frozenset(one.reason.cause for one in outcomes if one.end is None or not one.end.ok)
        return ReplicaRun(
            ok,
            self._done,
            reasons,
            causes,
            self.judge.final(),
            tuple(self._moments),
            self._struck,
            self.judge.takeovers,
        )

    def _next(self) -> _Choice | None:
        """One of all events that are possible now, or, where there are none, the next deadline.

        None: nobody who is left ever belonged to the job; a real task gives up after ``--startup_timeout``.
        """
        choices: list[_Choice] = [
            (self._deliver, pair) for pair, queue in self._queues.items() if queue and pair not in self._cut
        ]
        choices += [(self._work, task) for task in self.tasks.values() if task.work and task.alive]
        choices += [(self._learn, news) for news in self._news]
        choices += [(self._restart, name) for name in self._starts]
        choices += [(self._link, pair) for pair in self._unlinked if self._linkable(pair)]
        if choices:
            return choices[self._random.randrange(len(choices))]
        due = [(at, t) for t in self.tasks.values() if t.alive and (at := t.machine.next_deadline()) is not None]
        if (
            not due
            and self.judge.has_begun
            and not any(t.machine.viewing.number for t in self.tasks.values() if t.alive)
        ):
            return None
        if not due:
            raise Violation(Rule.NO_DEADLINE, "nothing can happen any more, and no task has a deadline")
        at, task = min(due, key=lambda one: (one[0], one[1].name))
        self.now = max(self.now, at)
        return self._tick, task

    def _handle(self, task: ReplicaTask, event: ReplicaEvent) -> None:
        if not task.alive:
            return
        self._done += 1
        number = self._events[task.name]
        self._events[task.name] += 1
        if not self.judge.end_is_decided:
            self._moments.append((task.name, number))
        self._trace.append((self._done, task.name, event))
        effects = task.machine.handle(event, self.now)
        if self._harm(task, number, effects_done=False):
            return
        for effect in effects:
            self._carry_out(task, effect)
        task.machine.check()
        self.judge.handled(task)
        self._harm(task, number, effects_done=True)

    # -- effects --

    def _carry_out(self, task: ReplicaTask, effect: ReplicaEffect) -> None:
        match effect:
            case Say(peer=peer, message=message):
                self.judge.said(task.name, message)
                self._send(task, peer, message)
            case MakeVersion():
                self.judge.making(task.name, effect)
                task.work.append(lambda: task.store.make(effect))
            case MakeCopy():
                task.work.append(lambda: task.store.make_copy(effect))
            case TakeCopy(copy=copy):
                task.store.take(copy)
            case SendCopy(peer=peer, view=view, bucket=bucket, version=version):
                self._send(task, peer, Stamped(view, task.store.copy(bucket, version)))
            case SendValue(peer=peer, view=view, bucket=bucket, version=version):
                number = task.store.value(bucket, version)
                self.judge.known(task.name, bucket, version, number)
                self._send(task, peer, Stamped(view, VersionOf(version, bucket, number)))
            case Compute(step=step, values=values, state=state):
                shape, buckets = self.scenario.shape, self.scenario.buckets
                task.work.append(lambda: computed(task.name, shape.workers, step, buckets, values, state))
            case TaskEnds():
                task.outcome = effect
                # A server that ends with the job stays until everybody has heard of it.
                if effect.end is None or task.name.role is Role.WORKER:
                    self._leave(task, losing=False)

    def _send(self, task: ReplicaTask, peer: TaskId, message: ReplicaMessage) -> None:
        queue = self._queues.get((task.name, peer))
        if queue is not None and self.tasks[peer].alive:
            queue.append(MessageHeard(task.name, task.life, message))

    def _deliver(self, pair: Pair) -> None:
        event = self._queues[pair].popleft()
        if isinstance(event, LinkLost):
            del self._queues[pair]
        self._handle(self.tasks[pair[1]], event)

    def _work(self, task: ReplicaTask) -> None:
        self._handle(task, task.work.popleft()())

    def _tick(self, task: ReplicaTask) -> None:
        self._handle(task, Tick())

    # -- lives and links --

    def _start(self, name: TaskId) -> None:
        self._lives += 1
        scenario, life = self.scenario, 1000 + self._lives
        server = name.role is Role.SERVER
        machine = (self._maker.server if server else self._maker.worker)(scenario, name, life)
        task = self.tasks[name] = ReplicaTask(name, life, machine, self._maker.store())
        for effect in machine.start(self.now):
            self._carry_out(task, effect)
        for other in scenario.shape.tasks():
            if other != name and Role.SERVER in (name.role, other.role):
                self._unlinked.append((name, other))

    def _linkable(self, pair: Pair) -> bool:
        """Both ends live, and what was still on its way between former incarnations has arrived."""
        one, other = pair
        both = one in self.tasks and other in self.tasks and self.tasks[one].alive and self.tasks[other].alive
        return both and pair not in self._cut and pair not in self._queues and (other, one) not in self._queues

    def _link(self, pair: Pair) -> None:
        one, other = pair
        self._unlinked = [known for known in self._unlinked if known not in (pair, (other, one))]
        self._queues[one, other] = deque([LinkUp(one, self.tasks[one].life)])
        self._queues[other, one] = deque([LinkUp(other, self.tasks[other].life)])

    def _learn(self, news: tuple[TaskId, PeerGone | LinkLost]) -> None:
        self._news.remove(news)
        self._handle(self.tasks[news[0]], news[1])

    def _restart(self, name: TaskId) -> None:
        self._starts.remove(name)
        self._start(name)

    def _leave(self, task: ReplicaTask, *, losing: bool) -> None:
        """The task is gone. The others notice their links, and get proof, each at a time of its own."""
        task.alive = False
        name = task.name
        self._unlinked = [pair for pair in self._unlinked if name not in pair]
        self._news = [news for news in self._news if news[0] != name]
        for other in self.scenario.shape.tasks():
            self._queues.pop((other, name), None)
            queue = self._queues.get((name, other))
            if queue is not None:
                if losing:
                    queue.clear()
                if self.tasks[other].alive:
                    queue.append(LinkLost(name, "ended"))
                else:
                    del self._queues[name, other]
            proven = self.scenario.proof_passes or (name, other) not in self._cut
            if other != name and self.tasks[other].alive and proven:
                reason = Reason(Cause.DEAD, "its monitor reports its end")
                self._news.append((other, PeerGone(name, reason, task.life)))
        self._cut = {pair for pair in self._cut if name not in pair}

    # -- harm --

    def _harm(self, task: ReplicaTask, number: int, *, effects_done: bool) -> bool:
        point = self._harms.get((task.name, number, effects_done))
        if point is None or not task.alive or self.judge.end_is_decided:
            return False
        if point.harm is Harm.CUT and not self.judge.has_begun:
            return False  # a cluster that cannot form is not this search's concern
        self._struck += 1
        self._trace.append((self._done, task.name, point.harm))
        match point.harm:
            case Harm.KILL | Harm.KILL_LOSING:
                self.judge.killed(task.name)
                self._leave(task, losing=point.harm is Harm.KILL_LOSING)
                returns = self.scenario.servers_return or not self.judge.has_begun
                if task.name.role is Role.WORKER or returns:
                    self._starts.append(task.name)
            case Harm.CUT:
                self.judge.must_complete = False
                one, other = self.scenario.shape.server_ids()[:2]
                for pair in ((one, other), (other, one)):
                    self._cut.add(pair)
                    if self._queues.pop(pair, None) is not None:
                        self._news.append((pair[1], LinkLost(pair[0], "silent")))
            case Harm.BREAK:
                self._break(task.name)
        return point.harm in (Harm.KILL, Harm.KILL_LOSING)

    def _break(self, name: TaskId) -> None:
        """All links of a task break and lose what is on its way."""
        for other in self.scenario.shape.tasks():
            if (name, other) not in self._queues or (other, name) not in self._queues:
                continue
            for one, two in ((name, other), (other, name)):
                self._queues[one, two].clear()
                self._queues[one, two].append(LinkLost(one, "broken"))
            self._unlinked.append((name, other))

    def story(self) -> str:
        """What happened last, and who waits for whom."""
        lines = [f"in {self.scenario}"]
        lines += [f"{number:5} {task.short:9} {event}" for number, task, event in self._trace]
        for task in self.tasks.values():
            lines += [f"  waits: {wait}" for wait in task.machine.waits() if task.alive]
        return "\n".join(lines)
