"""A whole job with second homes: the machines that run, events in a seeded order, kills at any of them.

Bytes are numbers, which stores (``stores.py``) and training loops (``step_loops.py``) mix: a version that was made of
anything else, in another order or twice, has another number than in the run that nobody disturbs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import (
    Apply,
    BecameMember,
    CopyBucket,
    Effect,
    GiveBack,
    GrantRegion,
    JobEnded,
    Prepare,
    Send,
    SendGradient,
    SendMean,
    SendPull,
    SendVersion,
    TakeBucket,
    VersionReady,
)
from lockstep.protocol.core.events import (
    Event,
    GradientArrived,
    LinkLost,
    LinkUp,
    MeanArrived,
    PeerGone,
    Prepared,
    Received,
    TensorKind,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import BucketId, ClusterShape, Incarnation, Role, TaskId, server
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Grant, Join, Message, ParameterEntry, Pull, Setting, Ticket
from lockstep.protocol.core.plan import make_plan
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.homed_machine import HomedServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine
from lockstep.sim.replicas.step_loops import LoopMemory, StepLoops
from lockstep.sim.replicas.stores import StoreMemory, Stores
from lockstep.sim.violation import Rule, Violation

RULES = RecoveryRules(on_worker_loss=LossPolicy.WAIT, server_replicas=1)
TICKET = Ticket("shm", 0, 1 << 20, 0, b"")
LEAST_LIMIT = 6_000
"""Events of a small run that has not ended by then never does."""
EVENTS_OF_TASK = 200
"""The same for each step of each task, kills and returns included: five times as many as are usual."""
_LAZY = 0.01
"""How likely a lazy queue is served while others could be."""
_TRACED = 60
_NEVER = 1e6
"""Seconds after which a deadline is none."""

Moment = tuple[TaskId, int]
"""A task, and the number of its event, over all of its incarnations."""
Action = Callable[[], None]


@dataclass(slots=True)
class ReplicaTask:
    """One incarnation of a task: its machines and its memory."""

    machine: TaskMachine
    alive: bool = True
    ended: JobEnded | None = None
    late: bool = False
    """A next incarnation."""
    events: int = 0
    """How many it has handled, with those of its former incarnations."""
    store: StoreMemory = field(default_factory=StoreMemory)
    loop: LoopMemory = field(default_factory=LoopMemory)

    @property
    def takes_part(self) -> bool:
        return self.alive and self.ended is None


class ReplicaWorld:
    """All tasks of one run."""

    rules = RULES
    eager = True
    bucket_bytes = 64

    def __init__(self, seed: int = 0, servers: int = 2, workers: int = 2, steps: int = 2, buckets: int = 4) -> None:
        self.rng = random.Random(seed)
        self.shape = ClusterShape(servers, workers)
        self.steps = steps
        self.parameters = tuple(ParameterEntry(f"p{index}", 16, "float32", 0) for index in range(buckets))
        self.plan = make_plan(self.parameters, servers, self.bucket_bytes)
        self.now = 0.0
        self.lives = 0
        self.tasks: dict[TaskId, ReplicaTask] = {}
        self.stores = Stores(self)
        self.loops = StepLoops(self)
        self.queues: dict[object, deque[Action]] = {}
        self.lazy: set[object] = set()
        """Queues that are seldom served."""
        self.links: dict[tuple[TaskId, TaskId], int] = {}
        """How often the link between two tasks was lost, as the first of them knows."""
        self.known: set[tuple[BucketId, int]] = set()
        """Versions that a worker has."""
        self.history: list[Moment] = []
        self.kills: dict[Moment, bool] = {}
        """Whether what follows from the event still leaves."""
        self.killed: list[TaskId] = []
        self.keeps_last_words = True
        """What a task had sent before it was killed arrives."""
        self.servers_return = False
        """Workers do in any case."""
        self.formed_at = 0
        """How many events there were before every task was a member."""
        self.trace: deque[tuple[float, TaskId, Event | str]] = deque(maxlen=_TRACED)
        for task in self.shape.tasks():
            self._make(task)
        for one in self.shape.tasks():
            for other in self.shape.tasks():
                if one < other and Role.SERVER in (one.role, other.role):
                    self.link(one, other)

    # -- tasks --

    def _make(self, task: TaskId) -> None:
        self.lives += 1
        journal, shape = Journal(), self.shape
        join = Join(str(task), self.lives, "host", 1, (Setting("optimizer", "sgd"),))
        until, returns = self.now + 300.0, self.rules.returns
        member = MemberMachine(
            task, shape.coordinator, join, until, journal, self.now, returns=returns, deputy=server(1)
        )
        coordinator: CoordinatorMachine | None = None
        deputy: DeputyMachine | None = None
        role: HomedServerMachine | WorkerMachine
        if task.role is Role.SERVER:
            role = HomedServerMachine(task, shape, journal, eager=self.eager, summed=False, any_rates=False)
            deputy = DeputyMachine(task, shape, self.rules, journal)
        else:
            role = WorkerMachine(task, shape, journal, eager=self.eager, tells_state=True)
        if task == shape.coordinator:
            coordinator = HomedCoordinator(shape, self.lives, journal, self.now, rules=self.rules)
        machine = TaskMachine(self.lives, member, (role,), coordinator, journal, deputy)
        self.tasks[task] = ReplicaTask(machine, events=self.tasks[task].events if task in self.tasks else 0)
        self.put(("start", task), partial(self._start, task))

    def _start(self, task: TaskId) -> None:
        self.carry_out(task, self.tasks[task].machine.start(self.now))

    def link(self, one: TaskId, other: TaskId) -> None:
        for here, there in ((one, other), (other, one)):
            self.put((here, "from", there), partial(self.handle, here, LinkUp(there, self.life(there))))

    def life(self, task: TaskId) -> Incarnation:
        return self.tasks[task].machine.incarnation

    def number(self) -> int:
        """One that nothing else has."""
        self.lives += 1
        return self.lives

    def put(self, queue: object, action: Action) -> None:
        self.queues.setdefault(queue, deque()).append(action)

    # -- a run --

    def run(self, limit: int | None = None) -> None:
        """Play it until the job has ended for everybody."""
        for _ in range(limit or max(LEAST_LIMIT, EVENTS_OF_TASK * self.steps * len(self.shape.tasks()))):
            if self.is_over():
                return
            ready = [queue for queue, actions in self.queues.items() if actions]
            if not ready:
                self._tick()
                continue
            self.now += 0.0001
            prompt = [queue for queue in ready if queue not in self.lazy or self.rng.random() < _LAZY]
            self.queues[self.rng.choice(prompt or ready)].popleft()()
        raise self.violation(Rule.NO_END, "the run does not end")

    def is_over(self) -> bool:
        """Whether the job has ended for everybody; a task that comes back after that finds nobody."""
        alive = [task for task in self.tasks.values() if task.alive]
        return all(task.ended is not None or (task.late and not task.machine.member.job) for task in alive)

    def _tick(self) -> None:
        """Nothing is under way: the next thing to happen is a deadline."""
        there = [task for task in self.tasks.values() if task.takes_part]
        due = [(at, task) for task in there if (at := task.machine.next_deadline()) is not None]
        at = min((when for when, _ in due), default=None)
        if at is None or at >= self.now + _NEVER:
            raise self.violation(Rule.NO_DEADLINE, "nothing will ever happen again")
        self.now = max(self.now, at)
        for when, task in due:
            if when <= self.now:
                self.handle(task.machine.task, Tick())

    def violation(self, rule: Rule, text: str) -> Violation:
        return Violation(rule, text, story=self.story())

    def must(self, holds: bool, rule: Rule, text: str) -> None:
        if not holds:
            raise self.violation(rule, text)

    def story(self) -> str:
        lines = [f"{at:.4f} {task.short} {what}" for at, task, what in self.trace]
        for name, task in self.tasks.items():
            lines.append(f"{name} alive={task.alive} ended={task.ended} {task.machine.snapshot()}")
            lines += [f"  waits {wait}" for wait in task.machine.waits()] if task.alive else []
        return "\n".join(lines)

    def handle(self, name: TaskId, event: Event) -> None:
        task = self.tasks[name]
        if not task.takes_part:
            return
        if isinstance(event, LinkLost):
            self.links[name, event.peer] = self.links.get((name, event.peer), 0) + 1
        self.trace.append((self.now, name, event))
        moment = (name, task.events)
        task.events += 1
        self.history.append(moment)
        if not self.formed_at and all(one.machine.member.job for one in self.tasks.values()):
            self.formed_at = len(self.history)
        effects = task.machine.handle(event, self.now)
        task.machine.check()
        killed, leaves = moment in self.kills, self.kills.pop(moment, True)
        if leaves:
            self.judge(name, effects)
            self.carry_out(name, effects)
        if killed:
            self.kill(name)

    def judge(self, name: TaskId, effects: Sequence[Effect]) -> None:
        """What must hold after every event; here nothing, in ``judged_world.py`` a lot."""

    def kill(self, name: TaskId) -> None:
        self.trace.append((self.now, name, "IS KILLED"))
        task = self.tasks[name]
        task.alive = False
        self.killed.append(name)
        gone = PeerGone(name, Reason(Cause.DEAD, "was killed by signal 9"), task.machine.incarnation)
        for peer in self.tasks:
            if peer == name or Role.SERVER not in (peer.role, name.role):
                continue
            if not self.keeps_last_words:
                self.forget(peer, name)
            self.forget(name, peer)
            self.put((peer, "from", name), partial(self._lost, peer, name, gone))
        for queue in ("store", "later", "train", "disk"):
            self.queues.pop((queue, name), None)
        if self.servers_return or name.role is Role.WORKER:
            self.put(("restart", name), partial(self._restart, name))

    def forget(self, task: TaskId, peer: TaskId) -> None:
        """Nothing that is on its way to a task from this one arrives."""
        self.queues.pop((task, "from", peer), None)
        self.queues.pop((task, "tensors", peer), None)

    def _restart(self, name: TaskId) -> None:
        """The next incarnation, once everybody has seen the last one's links break."""
        if any((peer, "from", name) in self.queues and self.queues[peer, "from", name] for peer in self.tasks):
            self.put(("restart", name), partial(self._restart, name))
            return
        self._make(name)
        self.tasks[name].late = True
        for peer, task in self.tasks.items():
            if peer != name and task.alive and Role.SERVER in (peer.role, name.role):
                self.link(name, peer)

    def _lost(self, peer: TaskId, name: TaskId, gone: PeerGone) -> None:
        self.queues.pop((peer, "tensors", name), None)
        self.handle(peer, LinkLost(name, "it is gone"))
        self.put((peer, "gone", name), partial(self.handle, peer, gone))

    # -- effects --

    def carry_out(self, name: TaskId, effects: Sequence[Effect]) -> None:
        task = self.tasks[name]
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message, overtakes=overtakes):
                    self.say(name, peer, message, "tensors" if overtakes else "from")
                case BecameMember() if name.role is Role.WORKER:
                    self.put(("train", name), partial(self.loops.prepare, name, effect))
                case Prepare():
                    self.put(("store", name), partial(self.handle, name, Prepared(self.plan)))
                case GrantRegion(peer=peer):
                    self.say(name, peer, Grant(TICKET))
                case SendPull():
                    self.say(name, effect.peer, Pull(effect.version, effect.have, TICKET, view=effect.view))
                case SendGradient() | SendVersion() | SendMean():
                    self._send_tensor(name, effect)
                case CopyBucket():
                    self.put(("store", name), partial(self.stores.copy, name, effect))
                case TakeBucket():
                    self.put(("store", name), partial(self.stores.take, name, effect))
                case Apply():
                    self.stores.apply(name, effect)
                case GiveBack(arrival=arrival):
                    task.store.give_back(arrival)
                case VersionReady(bucket=bucket, version=version):
                    task.loop.values[bucket] = (version, task.loop.incoming[bucket, version])
                    self.known.add((bucket, version))
                    self.put(("train", name), partial(self.loops.go_on, name))
                case JobEnded():
                    task.ended = effect
                case _:
                    pass

    def reaches(self, name: TaskId, peer: TaskId) -> bool:  # noqa: ARG002 - a cut is between two
        return self.tasks[peer].alive

    def say(self, name: TaskId, peer: TaskId, message: Message, way: str = "from") -> None:
        """What may overtake others goes the way of the tensors."""
        if self.reaches(name, peer):
            self.put((peer, way, name), partial(self.handle, peer, Received(name, self.life(name), message)))

    # -- tensors --

    def _send_tensor(self, name: TaskId, effect: SendGradient | SendVersion | SendMean) -> None:
        match effect:
            case SendGradient():
                arrive = self._gradient(name, effect)
            case SendVersion():
                arrive = self._version(name, effect)
            case SendMean():
                arrive = self._mean(name, effect)
        if self.reaches(name, effect.peer):
            self.put((effect.peer, "tensors", name), arrive)

    def _end_transfer(self, name: TaskId, life: Incarnation, ended: TransferEnded) -> None:
        if self.tasks[name].alive and self.life(name) == life:
            self.put((name, "tensors", ended.peer), partial(self.handle, name, ended))

    def _gradient(self, name: TaskId, effect: SendGradient) -> Action:
        cell, life = self.tasks[name].loop.gradients[effect.bucket], self.life(name)

        def arrive() -> None:
            number = self.tasks[effect.peer].store.keep(self.number(), cell)
            event = GradientArrived(name, life, effect.step, effect.bucket, effect.edition, number)
            self.handle(effect.peer, event)
            ended = TransferEnded(effect.peer, effect.step, effect.bucket, TensorKind.GRADIENT, ok=True)
            self._end_transfer(name, life, ended)

        return arrive

    def _version(self, name: TaskId, effect: SendVersion) -> Action:
        version, value = self.tasks[name].store.slots[effect.bucket, effect.slot]
        life, wrong = self.life(name), f"{name} has version {version} where {effect.version} should be"
        self.must(version == effect.version, Rule.UNKNOWN_VERSION, wrong)

        def arrive() -> None:
            self.tasks[effect.peer].loop.incoming[effect.bucket, effect.version] = value
            self.handle(effect.peer, VersionArrived(name, effect.version, effect.bucket))
            ended = TransferEnded(effect.peer, effect.version, effect.bucket, TensorKind.VERSION, ok=True)
            self._end_transfer(name, life, ended)

        return arrive

    def _mean(self, name: TaskId, effect: SendMean) -> Action:
        """A loan: the second home reads it in the home's memory, until it gives it back."""
        cell, life, peer = self.tasks[name].store.means[effect.bucket], self.life(name), effect.peer
        sent, link = list(cell), self.links.get((name, effect.peer), 0)

        def give_back() -> None:
            same = cell == sent or self.counts_as_dead(peer)
            self.must(same, Rule.OVERWRITTEN, f"a mean of {name} was overwritten while {peer} read it")
            if self.links.get((name, peer), 0) == link:
                ended = TransferEnded(peer, effect.step, effect.bucket, TensorKind.MEAN, ok=True)
                self._end_transfer(name, life, ended)

        def arrive() -> None:
            self.must(cell == sent, Rule.OVERWRITTEN, f"a mean of {name} was overwritten on its way to {peer}")
            number = self.tasks[peer].store.keep(self.number(), cell, give_back)
            self.handle(peer, MeanArrived(name, life, effect.step, effect.bucket, number, effect.update))

        return arrive

    def counts_as_dead(self, task: TaskId) -> bool:  # noqa: ARG002 - nobody does here
        """Whether nothing that this task still makes counts for anybody."""
        return False

    # -- the end --

    def numbers(self) -> dict[BucketId, int]:
        """Each bucket's last version, as every worker has it; as its home has it if no worker is left."""
        there = [task for name, task in self.tasks.items() if name.role is Role.WORKER and task.alive]
        found = [dict(task.loop.values) for task in there if task.loop.values or not task.late] or [self._at_homes()]
        self.must(all(one == found[0] for one in found), Rule.NOT_REPEATED, f"workers end with {found}")
        whole = all(version == self.steps for version, _ in found[0].values())
        self.must(whole, Rule.INCOMPLETE, f"workers end with {found[0]}")
        return {bucket: value for bucket, (_, value) in found[0].items()}

    def _at_homes(self) -> dict[BucketId, tuple[int, int]]:
        alive = [task for task in self.tasks.values() if task.alive]
        homes = [(task.store, task.machine.server) for task in alive if task.machine.server is not None]
        return {b: store.slots[b, self.steps % 2] for store, machine in homes for b in machine.buckets}
