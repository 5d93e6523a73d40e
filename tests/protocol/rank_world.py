"""A small world for the machines of ranks that come back: events in a seeded order, kills at any of them.

Numbers stand for bytes. The parameters of a version, the optimizer, and what a rank carries on by itself are mixed from
everything that they depend on, so whatever is lost, used twice or taken from elsewhere gives another number in the end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.rank_coordinator import RankCoordinator
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import (
    Apply,
    BecameMember,
    Effect,
    GiveBack,
    GrantRegion,
    JobEnded,
    Prepare,
    Send,
    SendGradient,
    SendPull,
    SendVersion,
    VersionReady,
    WordGiven,
)
from lockstep.protocol.core.events import (
    BucketApplied,
    Event,
    Finished,
    GradientArrived,
    LinkLost,
    LinkUp,
    PeerGone,
    Prepared,
    Produced,
    Received,
    Sealed,
    StateTaken,
    StepBegun,
    TensorKind,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, ClusterShape, TaskId, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Grant, Join, Layout, ParameterEntry, Pull, Setting, View
from lockstep.protocol.core.plan import make_plan
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.rank_share import RankShareMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.rank_machine import RankMachine
from lockstep.sim.replicas.stores import mixed
from lockstep.sim.replicas.world import TICKET

BUCKET_BYTES = 64
RULES = RecoveryRules(ranks_return=True)
Numbers = dict[BucketId, int]


@dataclass
class RankTask:
    """One incarnation of a rank: its machines, its memory, its program."""

    machine: TaskMachine
    alive: bool = True
    ended: JobEnded | None = None
    late: bool = False
    events: int = 0
    # its share
    slots: dict[tuple[BucketId, int], tuple[int, int]] = field(default_factory=dict)
    arrivals: dict[int, list[int]] = field(default_factory=dict)
    # its program
    landed: dict[tuple[BucketId, int], int] = field(default_factory=dict)
    """The means of two versions."""
    versions: dict[BucketId, int] = field(default_factory=dict)
    gradients: dict[BucketId, list[int]] = field(default_factory=dict)
    """Where the mean is put, too, once the word is given."""
    step: int = INITIAL_STEP
    sealed: bool = False
    parameters: int = 0
    before: tuple[int, int] = (-9, 0)
    """A version, and the parameters of it, kept until the next word."""
    momentum: int = 0
    state: int = 0
    window: int = -9
    """The version that parameters and optimizer have, while nobody changes them."""
    finished: bool = False


class RankWorld:
    """All ranks of one run."""

    def __init__(self, seed: int = 0, ranks: int = 2, steps: int = 3, buckets: int = 3) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.shape = ClusterShape(0, ranks)
        self.rules = RULES.of(self.shape)
        self.steps = steps
        self.entries = tuple(ParameterEntry(f"p{index}", 16, "float32", 0) for index in range(buckets))
        self.plan = make_plan(self.entries, ranks, BUCKET_BYTES)
        self.now = 0.0
        self.lives = 0
        self.tasks: dict[TaskId, RankTask] = {}
        self.queues: dict[object, deque[Callable[[], None]]] = {}
        self.wishes: list[tuple[TaskId, RankTask, Callable[[], bool]]] = []
        """What programs wait for from another rank's memory."""
        self.means: dict[tuple[BucketId, int], int] = {}
        self.views: dict[int, object] = {}
        self.history: list[tuple[TaskId, int]] = []
        self.kills: dict[tuple[TaskId, int], bool] = {}
        """(rank, number of its event): whether what follows from the event still leaves."""
        self.keeps_last_words = True
        self.killed: list[TaskId] = []
        self.may_end = False
        self.replayed = 0
        self.trace: deque[str] = deque(maxlen=80)
        for task in self.shape.tasks():
            self._make(task)
        for one in self.shape.tasks():
            for other in self.shape.tasks():
                if one < other:
                    self._link(one, other)

    # -- ranks --

    def _make(self, task: TaskId, *, late: bool = False) -> None:
        self.lives += 1
        journal, shape = Journal(), self.shape
        join = Join(str(task), self.lives, "host", 1, (Setting("optimizer", "sgd"),))
        member = MemberMachine(task, CHIEF, join, self.now + 300.0, journal, self.now, deputy=worker(1))
        roles = (RankMachine(task, shape, journal), RankShareMachine(task, shape, journal))
        deputy = DeputyMachine(task, shape, self.rules, journal, RankCoordinator)
        leads = RankCoordinator(shape, 77 + self.lives, journal, self.now, rules=self.rules) if task == CHIEF else None
        machine = TaskMachine(self.lives, member, roles, leads, journal, deputy)
        self.tasks[task] = RankTask(machine, late=late)
        self.put(("start", task), lambda: self._carry_out(task, machine.start(self.now)))

    def _link(self, one: TaskId, other: TaskId) -> None:
        for here, there in ((one, other), (other, one)):
            life = self.tasks[there].machine.incarnation
            self.put((here, "from", there), partial(self.handle, here, LinkUp(there, life)))

    def put(self, queue: object, action: Callable[[], None]) -> None:
        self.queues.setdefault(queue, deque()).append(action)

    # -- a run --

    def run(self, limit: int = 12_000) -> None:
        for _ in range(limit):
            if self.is_over():
                return
            self._grant_wishes()
            ready = [queue for queue, actions in self.queues.items() if actions]
            if ready:
                self.now += 0.0001
                self.queues[self.rng.choice(ready)].popleft()()
            else:
                self._tick()
        raise AssertionError("the run does not end:\n" + self.story())

    def is_over(self) -> bool:
        """A rank that comes back after the job has ended for everybody else finds nobody."""
        there = [task for task in self.tasks.values() if task.alive and (task.ended is not None or not task.late)]
        if any(not task.alive for task in self.tasks.values()) and not any(task.ended for task in there):
            return False
        return bool(there) and all(task.ended is not None for task in there) and not self._comes_back()

    def _comes_back(self) -> bool:
        """Whether a rank is in the job, or on its way to ranks that are."""
        return any(task.alive and task.ended is None and bool(task.machine.member.job) for task in self.tasks.values())

    def _grant_wishes(self) -> None:
        for wish in list(self.wishes):
            name, task, granted = wish
            if self.tasks[name] is not task or not task.alive or task.ended or granted():
                self.wishes.remove(wish)

    def _tick(self) -> None:
        alive = [task for task in self.tasks.values() if task.alive and task.ended is None]
        due = [(at, task) for task in alive if (at := task.machine.next_deadline()) is not None]
        assert due, "nothing will ever happen again:\n" + self.story()
        self.now = max(self.now, min(when for when, _ in due))
        for when, task in due:
            if when <= self.now:
                self.handle(task.machine.task, Tick())

    def story(self) -> str:
        lines = list(self.trace)
        for name, task in self.tasks.items():
            lines.append(f"{name.short} alive={task.alive} ended={task.ended} step={task.step} window={task.window}")
            lines.append(f"  {task.machine.snapshot()}")
            lines += [f"  waits {wait}" for wait in task.machine.waits()] if task.alive else []
        return "\n".join(lines)

    def handle(self, name: TaskId, event: Event) -> None:
        task = self.tasks[name]
        if not task.alive or task.ended is not None:
            return
        self.trace.append(f"{self.now:.4f} {name.short} {event}")
        moment = (name, task.events)
        task.events += 1
        self.history.append(moment)
        effects = task.machine.handle(event, self.now)
        task.machine.check()
        killed, leaves = moment in self.kills, self.kills.pop(moment, True)
        if leaves:
            self._carry_out(name, effects)
        if killed:
            self.kill(name)

    # -- kills --

    def kill(self, name: TaskId) -> None:
        self.trace.append(f"{self.now:.4f} {name.short} IS KILLED")
        task = self.tasks[name]
        self.may_end = self.may_end or not self._survives_without(name)
        task.alive = False
        self.killed.append(name)
        for queue in list(self.queues):
            if isinstance(queue, tuple) and len(queue) == 3 and queue[0] == name:
                del self.queues[queue]
        for queue in (("store", name), ("train", name), ("start", name)):
            self.queues.pop(queue, None)
        gone = PeerGone(name, Reason(Cause.DEAD, "was killed by signal 9"), task.machine.incarnation)
        for peer in self.tasks:
            if peer == name:
                continue
            if not self.keeps_last_words:
                self.queues.pop((peer, "from", name), None)
                self.queues.pop((peer, "tensors", name), None)
            self.put((peer, "from", name), partial(self._lost, peer, name, gone))
        self.put(("restart", name), partial(self._restart, name))

    def _survives_without(self, name: TaskId) -> bool:
        """Whether somebody is left who leads the job, or holds all that the one who does has decided."""
        others = [one for task, one in self.tasks.items() if task != name and one.alive and one.ended is None]
        formed = [one for one in self.tasks.values() if one.machine.member.job]
        if not formed:
            return True
        if any(one.machine.coordinator is not None and one.machine.member.job for one in others):
            return True
        deputies = [one.machine.deputy for one in others if one.machine.deputy is not None]
        held = [one.held for one in deputies if one.held is not None and one.held.decisions[0].second_task == one.task]
        return any(one.decisions[0].whole for one in held)

    def _restart(self, name: TaskId) -> None:
        if any(self.queues.get((peer, "from", name)) for peer in self.tasks if peer != name):
            self.put(("restart", name), partial(self._restart, name))
            return
        self._make(name, late=True)
        for peer, task in self.tasks.items():
            if peer != name and task.alive:
                self._link(name, peer)

    def _lost(self, peer: TaskId, name: TaskId, gone: PeerGone) -> None:
        self.queues.pop((peer, "tensors", name), None)
        self.handle(peer, LinkLost(name, "it is gone"))
        self.handle(peer, gone)

    # -- effects --

    def _carry_out(self, name: TaskId, effects: list[Effect]) -> None:
        task = self.tasks[name]
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message, overtakes=overtakes):
                    if isinstance(message, View):
                        said = (message.decisions, message.members, message.start)
                        assert self.views.setdefault(message.number, said) == said or self.may_end, "two views"
                    self._say(name, peer, message, "tensors" if overtakes else "from")
                case BecameMember():
                    self.train(name, task, partial(self._enter, name, effect))
                case Prepare():
                    self.put(("store", name), partial(self.handle, name, Prepared(self.plan)))
                case GrantRegion(peer=peer):
                    self._say(name, peer, Grant(TICKET))
                case SendPull():
                    self._say(name, effect.peer, Pull(effect.version, effect.have, TICKET, view=effect.view))
                case SendGradient():
                    self._send_gradient(name, effect)
                case SendVersion():
                    self._send_version(name, effect)
                case Apply():
                    self._apply(name, effect)
                case GiveBack(arrival=arrival):
                    task.arrivals.pop(arrival, None)
                case VersionReady(bucket=bucket, version=version):
                    task.versions[bucket] = version
                    self.train(name, task, partial(self._go_on, name))
                case WordGiven(step=step):
                    self._judge_word(step)
                    self.train(name, task, partial(self._go_on, name))
                case JobEnded():
                    task.ended = effect
                case _:
                    pass

    def _judge_word(self, step: int) -> None:
        """Every rank has every mean of the step, or is to come back after it; its state before it is not lost."""
        for task in self.tasks.values():
            if task.alive and task.machine.member.job and not task.late:
                lacking = [b.id for b in self.plan.buckets if task.versions.get(b.id, -9) <= step]
                assert not lacking, f"the word of step {step} is given too early\n{self.story()}"

    def _say(self, name: TaskId, peer: TaskId, message: object, way: str = "from") -> None:
        """What may overtake others goes the way of the tensors."""
        if self.tasks[peer].alive:
            received = Received(name, self.tasks[name].machine.incarnation, message)  # type: ignore[arg-type]
            self.put((peer, way, name), partial(self.handle, peer, received))

    def _tensor(self, name: TaskId, peer: TaskId, action: Callable[[], None]) -> None:
        if self.tasks[peer].alive:
            self.put((peer, "tensors", name), action)

    def _end_transfer(self, name: TaskId, life: int, peer: TaskId, ended: TransferEnded) -> None:
        if self.tasks[name].alive and self.tasks[name].machine.incarnation == life:
            self.put((name, "tensors", peer), partial(self.handle, name, ended))

    def _send_gradient(self, name: TaskId, effect: SendGradient) -> None:
        cell, life = self.tasks[name].gradients[effect.bucket], self.tasks[name].machine.incarnation
        ended = TransferEnded(effect.peer, effect.step, effect.bucket, TensorKind.GRADIENT, ok=True)

        def arrive() -> None:
            self.lives += 1
            self.tasks[effect.peer].arrivals[self.lives] = cell
            event = GradientArrived(name, life, effect.step, effect.bucket, effect.edition, self.lives)
            self.handle(effect.peer, event)
            self._end_transfer(name, life, effect.peer, ended)

        self._tensor(name, effect.peer, arrive)

    def _send_version(self, name: TaskId, effect: SendVersion) -> None:
        version, value = self.tasks[name].slots.get((effect.bucket, effect.slot), (effect.version, 0))
        life = self.tasks[name].machine.incarnation
        assert version == effect.version, f"{name} has version {version} where {effect.version} should be"
        ended = TransferEnded(effect.peer, effect.version, effect.bucket, TensorKind.VERSION, ok=True)

        def arrive() -> None:
            self.tasks[effect.peer].landed[effect.bucket, effect.version] = value
            self.handle(effect.peer, VersionArrived(name, effect.version, effect.bucket))
            self._end_transfer(name, life, effect.peer, ended)

        self._tensor(name, effect.peer, arrive)

    def _apply(self, name: TaskId, effect: Apply) -> None:
        task = self.tasks[name]
        cells = [task.arrivals.pop(number) for number in effect.arrivals]

        def make() -> None:
            if not task.alive:
                return
            given = [cell[0] for cell in cells]
            expected = 1 if effect.step == INITIAL_STEP else self.shape.workers
            assert len(given) == expected, "a mean is not made of every rank's gradient"
            value = given[0] if effect.step == INITIAL_STEP else mixed(given)
            known = self.means.setdefault((effect.bucket, effect.step + 1), value)
            assert known == value, f"the mean of step {effect.step} is another one\n{self.story()}"
            task.slots[effect.bucket, effect.to_slot] = (effect.step + 1, value)
            self.handle(name, BucketApplied(effect.bucket, effect.step))

        self.put(("store", name), make)

    # -- the program --

    def train(self, name: TaskId, task: RankTask, action: Callable[[], None]) -> None:
        """What this incarnation's program does next."""

        def unless_dead() -> None:
            if task.alive and task.ended is None:
                action()

        self.put(("train", name), unless_dead)

    def _enter(self, name: TaskId, member: BecameMember) -> None:
        task = self.tasks[name]
        layout = Layout(self.plan.hash, BUCKET_BYTES, self.entries, (), start=member.start)
        task.step = member.start - 1
        task.state = int.from_bytes(member.state, "big")
        self.handle(name, Prepared(self.plan, layout))
        if member.start == INITIAL_STEP:
            task.step = INITIAL_STEP
            task.sealed = True
            for bucket in self.plan.buckets:
                task.gradients[bucket.id] = [mixed("initial", bucket.id)]
                if name == CHIEF:
                    self.handle(name, Produced(INITIAL_STEP, bucket.id))
            return
        begins = self._replay if member.replays else self._fetch
        task.step = member.start
        self.train(name, task, partial(self._tell_begun, name, member.start, begins))

    def _tell_begun(self, name: TaskId, start: int, begins: Callable[..., None]) -> None:
        task = self.tasks[name]
        self.handle(name, StepBegun(start, ()))
        if task.alive:
            begins(name, start)

    def _peers(self, name: TaskId) -> list[RankTask]:
        return [task for peer, task in self.tasks.items() if peer != name and task.alive and task.ended is None]

    def _fetch(self, name: TaskId, start: int) -> None:
        task = self.tasks[name]

        def granted() -> bool:
            for peer in self._peers(name):
                if peer.window == start:
                    task.parameters, task.momentum = peer.parameters, peer.momentum
                    self.train(name, task, partial(self._iterate, name, start))
                    return True
            return False

        self.wishes.append((name, task, granted))

    def _replay(self, name: TaskId, start: int) -> None:
        """The iteration of the step before, which is committed: for what follows from it on this rank alone."""
        task, step = self.tasks[name], start - 1
        self.replayed += 1

        def granted() -> bool:
            for peer in self._peers(name):
                means = [peer.landed.get((bucket.id, start)) for bucket in self.plan.buckets]
                if peer.before[0] == step and peer.window == start and None not in means:
                    task.before = peer.before
                    # Another rank may come back to this step, and ask this one.
                    task.landed |= {(bucket.id, start): peer.landed[bucket.id, start] for bucket in self.plan.buckets}
                    task.parameters, task.momentum = peer.parameters, peer.momentum
                    task.state = mixed(name, step, task.state, peer.before[1], means, task.parameters)
                    self.train(name, task, partial(self._iterate, name, start))
                    return True
            return False

        self.wishes.append((name, task, granted))

    def _iterate(self, name: TaskId, step: int) -> None:
        """An iteration begins: the state is told, and parameters stay as they are until the word."""
        task = self.tasks[name]
        task.window, task.sealed = step, False
        self.handle(name, StateTaken(step, task.state.to_bytes(8, "big")))
        if not task.alive:
            return
        if step >= self.steps:
            task.finished = True
            self.handle(name, Finished(self.steps))
            return
        for bucket in self.plan.buckets:
            task.gradients[bucket.id] = [mixed(name, step, bucket.id, task.parameters, task.state)]
            self.train(name, task, partial(self.handle, name, Produced(step, bucket.id)))
        self.train(name, task, partial(self._seal, name, step))

    def _seal(self, name: TaskId, step: int) -> None:
        self.tasks[name].sealed = True
        self.handle(name, Sealed(step, (), (), state=None))
        self._go_on(name)

    def _go_on(self, name: TaskId) -> None:
        """The end of backward: every mean is here, and the word is given."""
        task = self.tasks[name]
        step = task.step
        worker_machine = task.machine.worker
        assert isinstance(worker_machine, RankMachine)
        if not task.alive or not task.sealed or worker_machine.word < step:
            return
        assert all(task.versions.get(b.id, -9) >= step + 1 for b in self.plan.buckets), "a word without the means"
        task.sealed, task.window = False, -9
        task.before = (step, task.parameters)
        for bucket in self.plan.buckets:
            task.gradients[bucket.id][0] = task.landed[bucket.id, step + 1]
        task.step = step + 1
        self.handle(name, StepBegun(step + 1, ()))
        self.train(name, task, partial(self._update, name, step))

    def _update(self, name: TaskId, step: int) -> None:
        task = self.tasks[name]
        means = [task.landed[bucket.id, step + 1] for bucket in self.plan.buckets]
        if step == INITIAL_STEP:
            task.parameters = mixed(means)
        else:
            task.momentum = mixed(task.momentum, means)
            task.parameters = mixed(task.parameters, task.momentum)
            task.state = mixed(name, step, task.state, task.before[1], means, task.parameters)
        self.train(name, task, partial(self._iterate, name, step + 1))

    # -- the end --

    def numbers(self) -> list[tuple[int, int, int]]:
        """Parameters, optimizer and what it carries on by itself, of each rank."""
        return [(t.parameters, t.momentum, t.state) if t.finished else (0, 0, 0) for t in self.tasks.values()]
