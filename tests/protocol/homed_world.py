"""A small world for the machines of jobs with second homes: events in a seeded order, kills at any of them.

Bytes are numbers. A store mixes them, so a version that was made of anything else, in another order or twice, has
another number than in the run that nobody disturbs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine, JobPhase
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
    BucketApplied,
    BucketTaken,
    Event,
    Finished,
    GradientArrived,
    LinkLost,
    LinkUp,
    MeanArrived,
    MeanMade,
    PeerGone,
    Prepared,
    Produced,
    Received,
    Sealed,
    StepBegun,
    TensorKind,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, ClusterShape, Role, TaskId, server
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import (
    BucketCopy,
    Grant,
    GroupRates,
    Join,
    Layout,
    ParameterEntry,
    Pull,
    Setting,
    Ticket,
)
from lockstep.protocol.core.plan import make_plan
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.homed_machine import HomedServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine

RULES = RecoveryRules(on_worker_loss=LossPolicy.WAIT, server_replicas=1)
TICKET = Ticket("shm", 0, 1 << 20, 0, b"")
BUCKET_BYTES = 64
LAZY = 0.01
"""How likely a lazy queue is served while others could be."""


def mixed(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def state_after(task: TaskId, step: int) -> bytes:
    """What a worker takes from this step into the next one."""
    return mixed(task, step).to_bytes(8, "big")


@dataclass
class HomedTask:
    """One incarnation of a task: its machines and its memory."""

    machine: TaskMachine
    alive: bool = True
    ended: JobEnded | None = None
    late: bool = False
    """A next incarnation."""
    events: int = 0
    # of a server
    slots: dict[tuple[BucketId, int], tuple[int, int]] = field(default_factory=dict)
    momentum: dict[BucketId, int] = field(default_factory=dict)
    means: dict[BucketId, list[int]] = field(default_factory=dict)
    arrivals: dict[int, list[int]] = field(default_factory=dict)
    loans: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Means of other servers that are read here, and how to give them back."""
    # of a worker
    values: dict[BucketId, tuple[int, int]] = field(default_factory=dict)
    incoming: dict[tuple[BucketId, int], int] = field(default_factory=dict)
    gradients: dict[BucketId, list[int]] = field(default_factory=dict)
    step: int = INITIAL_STEP
    busy: bool = False


class HomedWorld:
    """All tasks of one run."""

    rules = RULES
    eager = True

    def __init__(self, seed: int = 0, servers: int = 2, workers: int = 2, steps: int = 2, buckets: int = 4) -> None:
        self.rng = random.Random(seed)
        self.shape = ClusterShape(servers, workers)
        self.steps = steps
        self.parameters = tuple(ParameterEntry(f"p{index}", 16, "float32", 0) for index in range(buckets))
        self.plan = make_plan(self.parameters, servers, BUCKET_BYTES)
        self.now = 0.0
        self.lives = 0
        self.tasks: dict[TaskId, HomedTask] = {}
        self.queues: dict[object, deque[Callable[[], None]]] = {}
        self.lazy: set[object] = set()
        """Queues that are seldom served."""
        self.links: dict[tuple[TaskId, TaskId], int] = {}
        """How often the link between two tasks was lost, as the first of them knows."""
        self.made: dict[tuple[BucketId, int], list[TaskId]] = {}
        """Who began to make which version as its home."""
        self.known: set[tuple[BucketId, int]] = set()
        """Versions that a worker has."""
        self.history: list[tuple[TaskId, int]] = []
        self.kills: dict[tuple[TaskId, int], bool] = {}
        """(task, number of its event): whether what follows from the event still leaves."""
        self.killed: list[TaskId] = []
        self.keeps_last_words = True
        self.restarts = False
        self.formed_at_kill = False
        self.formed_at = 0
        """How many events there were before every task was a member."""
        self.trace: deque[str] = deque(maxlen=60)
        for task in self.shape.tasks():
            self._make(task)
        for one in self.shape.tasks():
            for other in self.shape.tasks():
                if one < other and Role.SERVER in (one.role, other.role):
                    self._link(one, other)

    # -- tasks --

    def _make(self, task: TaskId) -> None:
        self.lives += 1
        journal, shape = Journal(), self.shape
        join = Join(str(task), self.lives, "host", 1, (Setting("optimizer", "sgd"),))
        member = MemberMachine(task, shape.coordinator, join, self.now + 300.0, journal, self.now, deputy=server(1))
        coordinator: CoordinatorMachine | None = None
        deputy: DeputyMachine | None = None
        role: HomedServerMachine | WorkerMachine
        if task.role is Role.SERVER:
            role = HomedServerMachine(task, shape, journal, eager=self.eager, summed=False, any_rates=False)
            deputy = DeputyMachine(task, shape, self.rules, journal)
        else:
            role = WorkerMachine(task, shape, journal, eager=self.eager, tells_state=True)
        if task == shape.coordinator:
            coordinator = HomedCoordinator(shape, 77, journal, self.now, rules=self.rules)
        self.tasks[task] = HomedTask(TaskMachine(self.lives, member, (role,), coordinator, journal, deputy))
        self.put(("start", task), partial(self._start, task))

    def _start(self, task: TaskId) -> None:
        self._carry_out(task, self.tasks[task].machine.start(self.now))

    def _link(self, one: TaskId, other: TaskId) -> None:
        for here, there in ((one, other), (other, one)):
            life = self.tasks[there].machine.incarnation
            self.put((here, "from", there), partial(self.handle, here, LinkUp(there, life)))

    def put(self, queue: object, action: Callable[[], None]) -> None:
        self.queues.setdefault(queue, deque()).append(action)

    # -- a run --

    def run(self, limit: int = 6_000) -> None:
        for _ in range(limit):
            if self.is_over():
                return
            alive = [task for task in self.tasks.values() if task.alive and task.ended is None]
            ready = [queue for queue, actions in self.queues.items() if actions]
            if not ready:
                self._tick(alive)
                continue
            self.now += 0.0001
            prompt = [queue for queue in ready if queue not in self.lazy or self.rng.random() < LAZY]
            self.queues[self.rng.choice(prompt or ready)].popleft()()
        raise AssertionError("the run does not end:\n" + self.story())

    def is_over(self) -> bool:
        """Whether the job has ended for everybody; a task that comes back after that finds nobody."""
        alive = [task for task in self.tasks.values() if task.alive]
        return all(task.ended is not None or (task.late and not task.machine.member.job) for task in alive)

    def _tick(self, alive: list[HomedTask]) -> None:
        due = [(at, task) for task in alive if (at := task.machine.next_deadline()) is not None]
        assert due, "nothing will ever happen again:\n" + self.story()
        at = min(when for when, _ in due)
        assert at < self.now + 1e6, "no deadline in time:\n" + self.story()
        self.now = max(self.now, at)
        for when, task in due:
            if when <= self.now:
                self.handle(task.machine.task, Tick())

    def story(self) -> str:
        lines = list(self.trace)
        for name, task in self.tasks.items():
            lines.append(f"{name} alive={task.alive} ended={task.ended} {task.machine.snapshot()}")
            lines += [f"  waits {wait}" for wait in task.machine.waits()] if task.alive else []
        return "\n".join(lines)

    def handle(self, name: TaskId, event: Event) -> None:
        task = self.tasks[name]
        if not task.alive or task.ended is not None:
            return
        if isinstance(event, LinkLost):
            self.links[name, event.peer] = self.links.get((name, event.peer), 0) + 1
        self.trace.append(f"{self.now:.4f} {name.short} {event}")
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
            self._carry_out(name, effects)
        if killed:
            self.kill(name)

    def judge(self, name: TaskId, effects: list[Effect]) -> None:
        """What must hold after every event; here nothing, in ``homed_harms.py`` a lot."""

    def kill(self, name: TaskId) -> None:
        self.trace.append(f"{self.now:.4f} {name.short} IS KILLED")
        task = self.tasks[name]
        self.formed_at_kill = all(one.machine.member.job for one in self.tasks.values())
        task.alive = False
        self.killed.append(name)
        gone = PeerGone(name, Reason(Cause.DEAD, "was killed by signal 9"), task.machine.incarnation)
        for peer in self.tasks:
            if peer == name or Role.SERVER not in (peer.role, name.role):
                continue
            if not self.keeps_last_words:
                self.queues.pop((peer, "from", name), None)
                self.queues.pop((peer, "tensors", name), None)
            self.queues.pop((name, "from", peer), None)
            self.queues.pop((name, "tensors", peer), None)
            self.put((peer, "from", name), partial(self._lost, peer, name, gone))
        self.queues.pop(("store", name), None)
        self.queues.pop(("later", name), None)
        self.queues.pop(("train", name), None)
        if self.restarts:
            self.put(("restart", name), partial(self._restart, name))

    def _restart(self, name: TaskId) -> None:
        """The next incarnation, once everybody has seen the last one's links break."""
        if any((peer, "from", name) in self.queues and self.queues[peer, "from", name] for peer in self.tasks):
            self.put(("restart", name), partial(self._restart, name))
            return
        self._make(name)
        self.tasks[name].late = True
        for peer, task in self.tasks.items():
            if peer != name and task.alive and Role.SERVER in (peer.role, name.role):
                self._link(name, peer)

    @property
    def is_whole(self) -> bool:
        """Whether a coordinator that knows all present incarnations says that any one server may be lost."""
        now = {task: one.machine.incarnation for task, one in self.tasks.items() if one.alive}
        for task in self.tasks.values():
            leads = task.machine.coordinator
            if not task.alive or not isinstance(leads, HomedCoordinator) or leads.phase is not JobPhase.RUNNING:
                continue
            known = {name: join.incarnation for name, join in leads._joined.items()}
            told = not leads._waiting  # the deputy holds it, and then it is said
            return known == now and len(now) == len(self.tasks) and leads.servers.placement.whole and told
        return False

    def _lost(self, peer: TaskId, name: TaskId, gone: PeerGone) -> None:
        self.queues.pop((peer, "tensors", name), None)
        self.handle(peer, LinkLost(name, "it is gone"))
        self.put((peer, "gone", name), partial(self.handle, peer, gone))

    # -- effects --

    def _carry_out(self, name: TaskId, effects: list[Effect]) -> None:
        task = self.tasks[name]
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message, overtakes=overtakes):
                    self._say(name, peer, message, "tensors" if overtakes else "from")
                case BecameMember() if name.role is Role.WORKER:
                    self.put(("train", name), partial(self._prepare_worker, name, effect))
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
                case SendMean():
                    self._send_mean(name, effect)
                case CopyBucket():
                    self.put(("store", name), partial(self._copy, name, effect))
                case TakeBucket():
                    self.put(("store", name), partial(self._take, name, effect))
                case Apply():
                    self._apply(name, effect)
                case GiveBack(arrival=arrival):
                    task.arrivals.pop(arrival, None)
                    self._give_back(task, arrival)
                case VersionReady(bucket=bucket, version=version):
                    task.values[bucket] = (version, task.incoming[bucket, version])
                    self.known.add((bucket, version))
                    self.put(("train", name), partial(self._go_on, name))
                case JobEnded():
                    task.ended = effect
                case _:
                    pass

    def _reaches(self, name: TaskId, peer: TaskId) -> bool:
        return self.tasks[peer].alive

    def _say(self, name: TaskId, peer: TaskId, message: object, way: str = "from") -> None:
        """What may overtake others goes the way of the tensors."""
        if self._reaches(name, peer):
            life = self.tasks[name].machine.incarnation
            received = Received(name, life, message)  # type: ignore[arg-type]
            self.put((peer, way, name), partial(self.handle, peer, received))

    def _tensor(self, name: TaskId, peer: TaskId, action: Callable[[], None]) -> None:
        if self._reaches(name, peer):
            self.put((peer, "tensors", name), action)

    def _end_transfer(self, name: TaskId, life: int, peer: TaskId, ended: TransferEnded) -> None:
        if self.tasks[name].alive and self.tasks[name].machine.incarnation == life:
            self.put((name, "tensors", peer), partial(self.handle, name, ended))

    def _send_gradient(self, name: TaskId, effect: SendGradient) -> None:
        cell, life = self.tasks[name].gradients[effect.bucket], self.tasks[name].machine.incarnation
        ended = TransferEnded(effect.peer, effect.step, effect.bucket, TensorKind.GRADIENT, ok=True)

        def arrive() -> None:
            server = self.tasks[effect.peer]
            number = self._keep(server, cell)
            event = GradientArrived(name, life, effect.step, effect.bucket, effect.edition, number)
            self.handle(effect.peer, event)
            self._end_transfer(name, life, effect.peer, ended)

        self._tensor(name, effect.peer, arrive)

    def _keep(self, task: HomedTask, cell: list[int]) -> int:
        number = self.lives = self.lives + 1
        task.arrivals[number] = cell
        return number

    def _send_version(self, name: TaskId, effect: SendVersion) -> None:
        version, value = self.tasks[name].slots[effect.bucket, effect.slot]
        life = self.tasks[name].machine.incarnation
        assert version == effect.version, f"{name} has version {version} where {effect.version} should be"
        ended = TransferEnded(effect.peer, effect.version, effect.bucket, TensorKind.VERSION, ok=True)

        def arrive() -> None:
            worker = self.tasks[effect.peer]
            assert isinstance(worker.machine.role, WorkerMachine)
            worker.incoming[effect.bucket, effect.version] = value
            self.handle(effect.peer, VersionArrived(name, effect.version, effect.bucket))
            self._end_transfer(name, life, effect.peer, ended)

        self._tensor(name, effect.peer, arrive)

    def _send_mean(self, name: TaskId, effect: SendMean) -> None:
        """A loan: the second home reads it in the home's memory, until it gives it back."""
        cell, life = self.tasks[name].means[effect.bucket], self.tasks[name].machine.incarnation
        sent, link = list(cell), self.links.get((name, effect.peer), 0)
        ended = TransferEnded(effect.peer, effect.step, effect.bucket, TensorKind.MEAN, ok=True)

        def give_back() -> None:
            same = cell == sent or self._counts_as_dead(effect.peer)
            assert same, f"a mean of {name} was overwritten while {effect.peer} read it"
            if self.links.get((name, effect.peer), 0) == link:
                self._end_transfer(name, life, effect.peer, ended)

        def arrive() -> None:
            assert cell == sent, f"a mean of {name} was overwritten on its way to {effect.peer}"
            there = self.tasks[effect.peer]
            number = self._keep(there, cell)
            there.loans[number] = give_back
            self.handle(effect.peer, MeanArrived(name, life, effect.step, effect.bucket, number, effect.update))

        self._tensor(name, effect.peer, arrive)

    def _counts_as_dead(self, task: TaskId) -> bool:
        """Whether nothing that this task still makes counts for anybody."""
        return False

    def _give_back(self, task: HomedTask, arrival: int) -> None:
        if (loan := task.loans.pop(arrival, None)) is not None:
            loan()

    # -- the store --

    def _copy(self, name: TaskId, effect: CopyBucket) -> None:
        task = self.tasks[name]
        version, value = task.slots[effect.bucket, effect.version % 2]
        assert version == effect.version, f"{name} copies version {version}, not {effect.version}"
        data = f"{value} {task.momentum.get(effect.bucket, 0)}".encode()
        half = len(data) // 2
        for offset, part in ((0, data[:half]), (half, data[half:])):
            self._say(name, effect.peer, BucketCopy(effect.bucket, version, offset, len(data), part, effect.edition))

    def _take(self, name: TaskId, effect: TakeBucket) -> None:
        task = self.tasks[name]
        value, momentum = (int(number) for number in effect.data.split())
        task.slots[effect.bucket, effect.version % 2] = (effect.version, value)
        task.momentum[effect.bucket] = momentum
        self.handle(name, BucketTaken(effect.bucket, effect.version))

    def _apply(self, name: TaskId, effect: Apply) -> None:
        task = self.tasks[name]
        cells = [task.arrivals.pop(number) for number in effect.arrivals]
        given = [tuple(cell) for cell in cells]
        is_home = effect.bucket in task.machine.server._ledgers  # type: ignore[union-attr]
        if is_home:
            version = (effect.bucket, effect.step + 1)
            assert version not in self.known, f"{name} makes {version} again"
            self.made.setdefault(version, []).append(name)
        store = "later" if effect.in_background else "store"
        made = [mixed(given, effect.replicas, effect.scale, effect.limit)] if effect.hands_on else []

        def reduced() -> None:
            if effect.hands_on:
                task.means.setdefault(effect.bucket, [0])[:] = made  # where the last one was
                self.handle(name, MeanMade(effect.bucket, effect.step))
            if task.alive:
                self.put((store, name), update)

        def update() -> None:
            mean = made if effect.hands_on or not cells else list(cells[0])
            if effect.step == INITIAL_STEP or (effect.values and given):
                value = mean[0]
            else:
                base, value = task.slots[effect.bucket, effect.from_slot]
                assert base == effect.step, f"{name} makes step {effect.step} of version {base}"
                if given:
                    moved = mixed(task.momentum.get(effect.bucket, 0), mean, effect.rates)
                    task.momentum[effect.bucket] = moved
                    value = mixed(value, moved)
            task.slots[effect.bucket, effect.to_slot] = (effect.step + 1, value)
            self.handle(name, BucketApplied(effect.bucket, effect.step))
            for number in effect.arrivals:
                self._give_back(task, number)

        self.put((store, name), reduced)

    # -- the training loop --

    def _prepare_worker(self, name: TaskId, member: BecameMember) -> None:
        layout = Layout(self.plan.hash, BUCKET_BYTES, self.parameters, (), start=member.start)
        task = self.tasks[name]
        task.step = member.start - 1 if member.start > INITIAL_STEP else INITIAL_STEP
        if member.start > 0 and member.state != state_after(name, member.start - 1):
            raise AssertionError(f"{name} begins step {member.start} with another state")
        self.handle(name, Prepared(self.plan, layout))
        if name == CHIEF and member.start == INITIAL_STEP:
            for bucket in self.plan.buckets:
                task.gradients[bucket.id] = [mixed("initial", bucket.id)]
                self.handle(name, Produced(INITIAL_STEP, bucket.id))

    def _go_on(self, name: TaskId) -> None:
        task = self.tasks[name]
        version = task.step + 1
        whole = len(task.values) == len(self.plan.buckets)
        if task.busy or not whole or any(known != version for known, _ in task.values.values()):
            return
        task.step = version
        if version >= self.steps:
            self.handle(name, Finished(self.steps))
            return
        task.busy = True
        self.put(("train", name), partial(self._train, name, version))

    def _train(self, name: TaskId, step: int) -> None:
        task = self.tasks[name]
        rates = (GroupRates(("lr",), (0.1 / (step + 1),)),) if name == CHIEF else ()
        values = sorted(task.values.items())
        self.handle(name, StepBegun(step, rates))
        if not task.alive:
            return
        for bucket in self.plan.buckets:
            task.gradients[bucket.id] = [mixed(name, step, bucket.id, values)]
            self.put(("train", name), partial(self.handle, name, Produced(step, bucket.id)))
        self.put(("train", name), partial(self._seal, name, step))

    def _seal(self, name: TaskId, step: int) -> None:
        self.tasks[name].busy = False
        self.handle(name, Sealed(step, (), (), state=state_after(name, step)))
        self._go_on(name)

    # -- the end --

    def numbers(self) -> dict[BucketId, int]:
        """Each bucket's last version, as every worker has it."""
        there = [task for name, task in self.tasks.items() if name.role is Role.WORKER and task.alive]
        found = [dict(task.values) for task in there if task.values or not task.late]
        assert all(one == found[0] for one in found), found
        assert all(version == self.steps for version, _ in found[0].values()), found[0]
        return {bucket: value for bucket, (_, value) in found[0].items()}
