"""One machine on a bench: it is told events by hand, and its effects are looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import (
    BucketApplied,
    Event,
    GradientArrived,
    LinkUp,
    Prepared,
    Produced,
    Received,
    StepBegun,
    VersionArrived,
)
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, Step, TaskId, server, worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import Machine
from lockstep.protocol.core.messages import (
    Commit,
    Grant,
    GroupRates,
    Join,
    Layout,
    Message,
    Open,
    ParameterEntry,
    Pull,
    Rates,
    Setting,
    Ticket,
)
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.async_server_machine import AsyncServerMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine

Kind = TypeVar("Kind")

BUCKET_BYTES = 64
RATES = (GroupRates(("lr",), (0.1,)),)
TICKET = Ticket("bench", 1, 1024, 0, b"")
JOB = 77


def life(task: TaskId) -> int:
    """The incarnation of each task on the bench."""
    return 1000 * (1 + task.index) + (1 if task.role.value == "ps" else 2)


def entries(buckets: int) -> tuple[ParameterEntry, ...]:
    """Parameters that fill one bucket each."""
    return tuple(ParameterEntry(f"layer{i}.weight", 16, "float32", 0) for i in range(buckets))


def plan_of(buckets: int, servers: int) -> Plan:
    return make_plan(entries(buckets), servers, BUCKET_BYTES)


def layout_of(plan: Plan, start: Step = INITIAL_STEP) -> Layout:
    return Layout(plan.hash, plan.bucket_bytes, plan.parameters, (), start=start)


class Rig:
    """Drives one machine; ``check`` is called after every event."""

    def __init__(self, machine: Machine, journal: Journal) -> None:
        self.journal = journal
        self.now = 100.0
        self._machine = machine

    def tell(self, event: Event) -> list[Effect]:
        effects = self._machine.handle(event, self.now)
        self._machine.check()
        return effects

    def hear(self, peer: TaskId, message: Message, incarnation: int | None = None) -> list[Effect]:
        return self.tell(Received(peer, life(peer) if incarnation is None else incarnation, message))

    def drops(self) -> list[str]:
        """Why something was dropped, in order."""
        return [record.cause for record in self.journal if record.happening is Happening.DROPPED]


def only(effects: Sequence[Effect], kind: type[Kind]) -> list[Kind]:
    return [effect for effect in effects if isinstance(effect, kind)]


def messages_to(effects: Sequence[Effect], peer: TaskId, kind: type[Kind]) -> list[Kind]:
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send) and effect.peer == peer and isinstance(effect.message, kind)
    ]


class WorkerRig(Rig):
    """Worker ``index`` of a cluster with ``servers`` servers, linked and with its model prepared."""

    def __init__(
        self, *, index: int = 0, servers: int = 1, buckets: int = 1, eager: bool = True, may_lag: bool = False
    ) -> None:
        journal = Journal()
        self.machine = WorkerMachine(
            worker(index), ClusterShape(servers, index + 1), journal, eager=eager, may_lag=may_lag
        )
        super().__init__(self.machine, journal)
        self.plan = plan_of(buckets, servers)
        for i in range(servers):
            self.tell(LinkUp(server(i), life(server(i))))
        self.prepared = self.tell(Prepared(self.plan, layout_of(self.plan)))

    def grant_and_open(self, step: int, have: tuple[int, ...] = ()) -> list[Effect]:
        effects: list[Effect] = []
        for peer in sorted({server(bucket.server) for bucket in self.plan.buckets}):
            effects += self.hear(peer, Grant(TICKET))
            effects += self.hear(peer, Open(step, have))
        return effects

    def receive_version(self, version: int) -> list[Effect]:
        effects: list[Effect] = []
        for bucket in self.plan.buckets:
            effects += self.tell(VersionArrived(server(bucket.server), version, bucket.id))
        return effects

    def begin(self, step: int) -> list[Effect]:
        """All buckets are at ``step``, and the training loop begins it."""
        if step > 0 and self.machine.step < step - 1:
            raise ValueError("one step after the other")
        self.receive_version(step)
        return self.tell(StepBegun(step, RATES if self.machine.task == worker(0) else ()))

    def produce(self, step: int, bucket: int = 0) -> list[Effect]:
        return self.tell(Produced(step, bucket))

    def state(self, bucket: int = 0) -> str:
        buckets = self.machine.snapshot()["buckets"]
        assert isinstance(buckets, list)
        return str(buckets[bucket]["state"])


class ServerRig(Rig):
    """Server 0 of a cluster, linked with every worker but the absent ones."""

    machine: ServerMachine

    def __init__(
        self,
        *,
        workers: int = 2,
        servers: int = 1,
        buckets: int = 1,
        index: int = 0,
        eager: bool = True,
        synchronous: bool = True,
        aggregate: int | None = None,
        overwrites: bool = False,
        absent: Collection[TaskId] = (),
    ) -> None:
        journal = Journal()
        self.shape = ClusterShape(servers, workers)
        task = server(index)
        self.machine = (
            ServerMachine(task, self.shape, journal, eager=eager, aggregate=aggregate, overwrites=overwrites)
            if synchronous
            else AsyncServerMachine(task, self.shape, journal, eager=eager)
        )
        super().__init__(self.machine, journal)
        self.plan = plan_of(buckets, servers)
        self.arrivals = 0
        self.tell(LinkUp(self.shape.coordinator, life(self.shape.coordinator)))
        for w in self.shape.worker_ids():
            if w not in absent:
                self.tell(LinkUp(w, life(w)))

    def prepare(self, start: Step = INITIAL_STEP) -> list[Effect]:
        """Every worker announces the same model, and memory is there."""
        for w in self.shape.worker_ids():
            self.hear(w, layout_of(self.plan, start))
        return self.tell(Prepared(self.plan))

    def arrive(
        self, index: int, step: int, bucket: int = 0, edition: int = 0, incarnation: int | None = None
    ) -> list[Effect]:
        """A gradient of worker ``index``."""
        self.arrivals += 1
        peer = worker(index)
        of = life(peer) if incarnation is None else incarnation
        return self.tell(GradientArrived(peer, of, step, bucket, edition, self.arrivals))

    def applied(self, step: int, bucket: int = 0) -> list[Effect]:
        return self.tell(BucketApplied(bucket, step))

    def commit(self, step: int) -> list[Effect]:
        return self.hear(self.shape.coordinator, Commit(step))

    def say_rates(self, step: int) -> list[Effect]:
        return self.hear(worker(0), Rates(step, RATES))

    def initialise(self) -> None:
        """Version 0 of every bucket is made of the chief's initial parameters, and committed."""
        self.prepare()
        mine = self.plan.buckets_of(self.machine.task.index)
        for bucket in mine:
            self.arrive(0, INITIAL_STEP, bucket.id)
        for bucket in mine:
            self.applied(INITIAL_STEP, bucket.id)
        self.commit(INITIAL_STEP)

    def pull(self, index: int, version: int, have: tuple[int, ...] = ()) -> list[Effect]:
        return self.hear(worker(index), Pull(version, have, TICKET))

    def state(self, bucket: int = 0) -> str:
        buckets = self.machine.snapshot()["buckets"]
        assert isinstance(buckets, list)
        return str(next(b["state"] for b in buckets if b["id"] == bucket))


def join_of(
    task: TaskId, settings: Mapping[str, str] | None = None, *, pid: int = 1, incarnation: int | None = None
) -> Join:
    chosen = settings or {"optimizer": "sgd"}
    return Join(
        str(task),
        life(task) if incarnation is None else incarnation,
        f"host{task.index}",
        pid,
        tuple(Setting(name, value) for name, value in chosen.items()),
    )


class CoordinatorRig(Rig):
    """The coordinator of a cluster, before anybody has joined."""

    def __init__(
        self,
        *,
        servers: int = 1,
        workers: int = 2,
        aggregate: int | None = None,
        rules: RecoveryRules | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        journal = Journal()
        self.shape = ClusterShape(servers, workers)
        self.machine = CoordinatorMachine(
            self.shape, JOB, journal, 100.0, aggregate=aggregate, rules=rules, beginning=beginning
        )
        super().__init__(self.machine, journal)

    def join(self, task: TaskId, **settings: str) -> list[Effect]:
        return self.hear(task, join_of(task, settings))

    def join_all(self) -> list[Effect]:
        effects: list[Effect] = []
        for task in self.shape.tasks():
            effects += self.join(task)
        return effects


class MemberRig(Rig):
    """The membership of worker 1."""

    def __init__(self, *, seconds: float = 300.0, deputy: TaskId | None = None, returns: bool = False) -> None:
        journal, until = Journal(), 100.0 + seconds
        join = join_of(worker(1))
        self.machine = MemberMachine(worker(1), server(0), join, until, journal, 100.0, returns=returns, deputy=deputy)
        super().__init__(self.machine, journal)
