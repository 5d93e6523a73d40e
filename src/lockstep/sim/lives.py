"""A small cluster whose tasks are killed and started again: the real machines, and numbers instead of tensors.

The other simulator (``world.py``) makes the network bad; here the network is good and lives are short. Every parameter
bucket is a number that depends on all that ever went into it, in its order, with an optimizer's state that is changed
in place beside it; every worker has a local state that each step moves on. So one gradient that is lost, doubled or
stale, or computed from anything but what the undisturbed run had, shows in the last numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count

from lockstep.protocol.causes import Cause, Reason
from lockstep.protocol.effects import (
    Apply,
    BecameMember,
    Effect,
    GiveBack,
    GrantRegion,
    JobEnded,
    PeerLeaves,
    Prepare,
    SaveShard,
    Send,
    SendGradient,
    SendPull,
    SendVersion,
    StillMissing,
    VersionReady,
    ViewChanged,
    WriteCheckpoint,
)
from lockstep.protocol.events import (
    BucketApplied,
    CheckpointWritten,
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
    ShardSaved,
    SignalCame,
    StateTaken,
    StepBegun,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.ids import CHIEF, INITIAL_STEP, BucketId, Role, Step, TaskId
from lockstep.protocol.leaving import Departure
from lockstep.protocol.messages import (
    Grant,
    GroupRates,
    Layout,
    Member,
    Pull,
    Saved,
    Ticket,
)
from lockstep.protocol.plan import make_plan
from lockstep.protocol.recovery import LossPolicy
from lockstep.sim.machines import life_machine
from lockstep.sim.network import linked_pairs
from lockstep.sim.short_lives import Disk, KillPoint, Life, LivesScenario, mixed
from lockstep.sim.violation import Rule, Violation

TICKET = Ticket("simulated", 1, 1024, 0, b"")
DELAY = 0.001
NOTICED = 0.5
"""So long after a death the others know of it."""
STARTED = 1.0
MOST_EVENTS = 200_000


class LivesWorld:
    """One run; ``run`` gives the last numbers of every bucket."""

    def __init__(self, scenario: LivesScenario) -> None:
        self.scenario = scenario
        self.shape = scenario.shape
        self.plan = make_plan(scenario.entries(), scenario.servers, 64)
        self.disk = Disk()
        self.now = 0.0
        self.events: dict[TaskId, int] = dict.fromkeys(self.shape.tasks(), 0)
        self.story: list[tuple[TaskId, int, Step]] = []
        """Who got an event, its how-manieth that was, and which step was the last committed one then."""
        self.lost = 0
        self._kills = set(scenario.kills)
        self._signals = set(scenario.signals)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._numbers = count(1)
        self.lives: dict[TaskId, Life] = {}
        self.final: dict[BucketId, int] = {}

    # -- a run --

    def run(self) -> dict[BucketId, int]:
        for task in self.shape.tasks():
            self._start(task)
        for _ in range(MOST_EVENTS):
            if all(life.ended is not None and life.ended.ok for life in self.lives.values()):
                return self.final
            if any(life.ended is not None and not life.ended.ok and life.alive for life in self.lives.values()):
                raise Violation(Rule.BAD_END, f"the job ended: {[life.ended for life in self.lives.values()]}")
            self._step_once()
        raise Violation(
            Rule.NO_END,
            f"the run does not end; waits: {[w for one in self.lives.values() for w in one.machine.waits()]}",
        )

    def _step_once(self) -> None:
        due = [
            (deadline, life.task)
            for life in self.lives.values()
            if life.alive and (deadline := life.machine.next_deadline()) is not None
        ]
        first = min(due, default=None)
        if self._agenda and (first is None or self._agenda[0][0] <= first[0]):
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        elif first is not None:
            self.now = max(self.now, first[0])
            self._tell(self.lives[first[1]], Tick())
        else:
            raise Violation(Rule.NO_DEADLINE, "nobody has a deadline: nothing will ever happen again")

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    # -- lives --

    def _start(self, task: TaskId) -> None:
        incarnation = 1_000_000 * (1 + self.shape.tasks().index(task)) + next(self._numbers)
        machine = life_machine(
            self.shape,
            task,
            incarnation,
            self.scenario.rules(),
            self.disk.beginning(),
            next(self._numbers),
            self.now,
            eager=self.scenario.eager,
        )
        life = self.lives[task] = Life(task, incarnation, machine)
        self._carry_out_all(life, machine.start(self.now))
        for other in self.lives.values():
            # Whoever knew a former life finds out, at the latest when it looks for this one.
            if other.alive and other.met.get(task, incarnation) != incarnation:
                gone = PeerGone(task, Reason(Cause.STALE_INCARNATION, "was started again"), other.met[task])
                self._later(NOTICED, partial(self._tell_if_alive, other, gone))
        self._open_links()

    def _open_links(self) -> None:
        """A link opens where neither end knows another life of the other; the coordinator takes a worker's new one."""
        for one, other in linked_pairs(self.shape):
            a, b = self.lives.get(one), self.lives.get(other)
            if a is None or b is None or not (a.alive and b.alive) or other in a.links or a.ended or b.ended:
                continue
            if self._knows_another(a, b) or self._knows_another(b, a):
                continue
            for here, there in ((a, b), (b, a)):
                here.links.add(there.task)
                here.met[there.task] = there.incarnation
                self._post(here, LinkUp(there.task, there.incarnation))

    def _knows_another(self, here: Life, there: Life) -> bool:
        known = here.lives.get(there.task, there.incarnation)
        rejoins = there.task.role is Role.WORKER and here.machine.coordinator is not None
        return known != there.incarnation and not (rejoins and self.scenario.policy is not LossPolicy.ABORT)

    def _die(self, life: Life, *, noticed: bool = True) -> None:
        if not life.alive:
            return
        life.alive = False
        self.lost += noticed
        for peer in list(life.links):
            other = self.lives[peer]
            other.links.discard(life.task)
            if not other.alive:
                continue
            self._post(other, LinkLost(life.task, "its process is gone"))
            gone = PeerGone(life.task, Reason(Cause.DEAD, "was killed by SIGKILL", exit_code=-9), life.incarnation)
            self._later(NOTICED, partial(self._tell_if_alive, other, gone))
        self._later(STARTED, partial(self._start, life.task))

    def _tell_if_alive(self, life: Life, event: Event) -> None:
        if life.alive and life.ended is None and self.lives[life.task] is life:
            self._tell(life, event)

    def _post(self, life: Life, event: Event, link: TaskId | None = None) -> None:
        """In order; what comes over a link is void with it."""
        sender = None if link is None else self.lives[link]

        def deliver() -> None:
            if sender is None or (link in life.links and self.lives[sender.task] is sender):
                self._tell_if_alive(life, event)

        self._later(DELAY, deliver)

    def _tell(self, life: Life, event: Event) -> None:
        number = self.events[life.task]
        self.events[life.task] += 1
        self.story.append((life.task, number, self._committed()))
        effects = life.machine.handle(event, self.now)
        life.machine.check()
        if KillPoint(life.task, number, False) in self._kills:
            self._die(life)
            return
        self._carry_out_all(life, effects)
        if KillPoint(life.task, number, True) in self._kills and life.alive:
            self._die(life)
        if (life.task, number) in self._signals:
            self._post(life, SignalCame(Departure.SIGTERM))
        self._open_links()

    def _committed(self) -> Step:
        coordinator = self.lives[self.shape.coordinator].machine.coordinator
        return INITIAL_STEP - 1 if coordinator is None else coordinator.committed

    # -- effects --

    def _carry_out_all(self, life: Life, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out(life, effect)

    def _carry_out(self, life: Life, effect: Effect) -> None:
        match effect:
            case Send(peer=peer, message=message):
                if peer in life.links:
                    self._post(self.lives[peer], Received(life.task, life.incarnation, message), life.task)
            case BecameMember():
                life.job = effect.job
                self._know(life, effect.members)
                if life.task.role is Role.WORKER:
                    self._begin(life, effect)
            case ViewChanged(members=members):
                self._know(life, members)
            case StillMissing() | PeerLeaves():
                pass
            case JobEnded():
                self._end(life, effect)
            case _ if life.task.role is Role.WORKER:
                self._work(life, effect)
            case _:
                self._serve(life, effect)

    def _know(self, life: Life, members: tuple[Member, ...]) -> None:
        life.lives = {TaskId.parse(member.task): member.incarnation for member in members}

    def _end(self, life: Life, effect: JobEnded) -> None:
        if effect.again or effect.departure is not None:
            # Another life, of the same process or not: the others find out as they would of a death.
            self._later(0.0, partial(self._die, life, noticed=False))
            life.ended = None
            return
        life.ended = effect
        if effect.ok and life.task.role is Role.SERVER:
            for bucket, slots in life.shard.slots.items():
                self.final[bucket] = mixed(slots[self.scenario.steps % 2], life.shard.momentum[bucket])

    # -- a server --

    def _serve(self, life: Life, effect: Effect) -> None:
        match effect:
            case Prepare(layout=layout):
                self._prepare(life, layout)
                self._post(life, Prepared(self.plan))
            case GrantRegion(peer=peer):
                self._post(self.lives[peer], Received(life.task, life.incarnation, Grant(TICKET)), life.task)
            case Apply():
                self._apply(life, effect)
            case GiveBack(arrival=arrival):
                del life.arrivals[arrival]
            case SendVersion(peer=peer, version=version, bucket=bucket, slot=slot):
                value = life.shard.slots[bucket][slot]
                self._later(DELAY, partial(self._arrive, life, peer, version, bucket, value))
            case SaveShard(version=version):
                kept = {b: (s[version % 2], life.shard.momentum[b]) for b, s in life.shard.slots.items()}
                self._later(5 * DELAY, partial(self._write_shard, life, version, kept))
            case WriteCheckpoint():
                self._later(5 * DELAY, partial(self._write_checkpoint, life, effect))

    def _prepare(self, life: Life, layout: Layout) -> None:
        for bucket in self.plan.buckets_of(life.task.index):
            life.shard.slots[bucket.id], life.shard.momentum[bucket.id] = [0, 0], 0
            if layout.start > INITIAL_STEP:
                value, momentum = self.disk.complete[int(layout.checkpoint)][0][bucket.id]
                life.shard.slots[bucket.id][layout.start % 2], life.shard.momentum[bucket.id] = value, momentum

    def _apply(self, life: Life, effect: Apply) -> None:
        given = [life.arrivals.pop(number) for number in effect.arrivals]

        def done() -> None:
            if not life.alive:
                return
            shard, bucket = life.shard, effect.bucket
            if effect.step == INITIAL_STEP:
                shard.slots[bucket][effect.to_slot] = given[0]
            else:
                shard.momentum[bucket] = mixed(shard.momentum[bucket], given, effect.replicas, effect.rates)
                old = shard.slots[bucket][effect.from_slot]
                shard.slots[bucket][effect.to_slot] = mixed(old, shard.momentum[bucket])
            self._tell_if_alive(life, BucketApplied(bucket, effect.step))

        self._later(DELAY, done)

    def _arrive(self, life: Life, peer: TaskId, version: int, bucket: BucketId, value: int) -> None:
        there = self.lives[peer]
        if not life.alive or peer not in life.links or not there.alive:
            return
        before = there.values.get(bucket)
        there.values[bucket] = value
        self._tell_if_alive(there, VersionArrived(life.task, version, bucket))
        if there.versions.get(bucket) != version and before is not None:
            there.values[bucket] = before  # it was refused
        self._tell_if_alive(life, TransferEnded(peer, version, bucket, ok=True))

    def _write_shard(self, life: Life, version: int, kept: dict[BucketId, tuple[int, int]]) -> None:
        if life.alive:
            self.disk.parts.setdefault((version, life.job), {})[life.task.index] = kept
            self._tell_if_alive(life, ShardSaved(Saved(version, f"shard-{life.task.index}", 1, "")))

    def _write_checkpoint(self, life: Life, effect: WriteCheckpoint) -> None:
        if life.alive:
            shards = self.disk.parts.pop((effect.version, life.job))
            whole = {bucket: numbers for kept in shards.values() for bucket, numbers in kept.items()}
            self.disk.complete[effect.version] = (whole, dict(effect.states))
            self._tell_if_alive(life, CheckpointWritten(effect.version))

    # -- a worker --

    def _begin(self, life: Life, effect: BecameMember) -> None:
        life.state, life.step = effect.state or b"as built", effect.start
        layout = Layout(self.plan.hash, 64, self.plan.parameters, (), start=effect.start, checkpoint=effect.checkpoint)
        life.wanted = max(effect.start, 0)
        self._post(life, Prepared(self.plan, layout))
        if life.task == CHIEF and effect.start == INITIAL_STEP:
            for bucket in self.plan.buckets:
                life.gradients[bucket.id] = mixed("initial", bucket.id)
                self._post(life, Produced(INITIAL_STEP, bucket.id))

    def _work(self, life: Life, effect: Effect) -> None:
        match effect:
            case SendPull(peer=peer, version=version, have=have):
                if peer in life.links:
                    pull = Pull(version, have, TICKET)
                    self._post(self.lives[peer], Received(life.task, life.incarnation, pull), life.task)
            case SendGradient(peer=peer, step=step, bucket=bucket, edition=edition):
                value = life.gradients[bucket]
                self._later(DELAY, partial(self._deliver, life, peer, step, bucket, edition, value))
            case VersionReady(bucket=bucket, version=version):
                life.versions[bucket] = version
                self._go_on_if_whole(life)

    def _go_on_if_whole(self, life: Life) -> None:
        """The training loop goes on when all that it waits for is there."""
        if life.wanted is not None and all(life.versions.get(b.id) == life.wanted for b in self.plan.buckets):
            self._later(DELAY, partial(self._one_step, life, life.wanted))
            life.wanted = None

    def _deliver(self, life: Life, peer: TaskId, step: Step, bucket: BucketId, edition: int, value: int) -> None:
        there = self.lives[peer]
        if not life.alive or peer not in life.links or not there.alive or there.ended is not None:
            return
        number = next(self._numbers)
        there.arrivals[number] = value
        self._tell_if_alive(there, GradientArrived(life.task, life.incarnation, step, bucket, edition, number))
        self._tell_if_alive(life, TransferEnded(peer, step, bucket, ok=True))

    def _one_step(self, life: Life, step: Step) -> None:
        if not life.alive:
            return
        if life.untold is not None:
            self._post(life, StateTaken(life.untold, life.state))
            life.untold = None
        if step == self.scenario.steps:
            self._post(life, Finished(step))
            return
        life.step = step
        told = life.task == CHIEF or self.scenario.policy is LossPolicy.SHRINK
        self._post(life, StepBegun(step, (GroupRates(("lr",), (0.1 * (step + 1),)),) if told else ()))
        for number, bucket in enumerate(reversed(self.plan.buckets)):
            self._later((5 + 5 * number) * DELAY, partial(self._produce, life, step, bucket.id))
        self._later((10 + 5 * len(self.plan.buckets)) * DELAY, partial(self._seal, life, step))

    def _produce(self, life: Life, step: Step, bucket: BucketId) -> None:
        """Backward has come to this bucket: its gradient is made of what the parameters are now."""
        if life.alive:
            life.gradients[bucket] = mixed(life.task.index, step, bucket, life.values[bucket], life.state)
            self._tell_if_alive(life, Produced(step, bucket))

    def _seal(self, life: Life, step: Step) -> None:
        if life.alive:
            life.state = mixed(life.state, step).to_bytes(4, "big")
            eager = self.scenario.eager
            life.untold = None if eager else step + 1
            self._tell_if_alive(life, Sealed(step, (), (), state=life.state if eager else None))
            life.wanted = step + 1
            self._go_on_if_whole(life)
