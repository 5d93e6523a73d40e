"""The rest of a simulated worker: its memory, its training loop, and how it carries out the effects of its machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.calls import OUTSIDE_LOOPS
from lockstep.protocol.core.effects import (
    BecameMember,
    CallAnswered,
    Effect,
    NormKnown,
    SendGradient,
    SendPull,
    VersionReady,
)
from lockstep.protocol.core.events import (
    Calling,
    Finished,
    Prepared,
    Produced,
    Sealed,
    StateTaken,
    StepBegun,
    TensorKind,
    TransferEnded,
)
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Incarnation, JobId, Step, TaskId
from lockstep.protocol.core.messages import CallMade, CallPlace, GroupRates, Layout, ParameterEntry, Pull
from lockstep.protocol.core.plan import Plan
from lockstep.sim.clipping import CLIP, questions_in
from lockstep.sim.context import SimulationContext, own_ticket, ticket_for
from lockstep.sim.memory import Cell, VersionTag
from lockstep.sim.network_faults import Chance
from lockstep.sim.numbers import mixed
from lockstep.sim.oracle import Oracle, brought_to
from lockstep.sim.scenario import Mode, SecondsRange
from lockstep.sim.server_side import LentCell, SimulatedServer, Where
from lockstep.sim.transfers import Copy, Lanes, OwnLoan, Parcel, Route, SimulatedLoan


class SimulatedWorker:
    """One worker without its machines: what backward, the optimizer call and the wait for versions do."""

    def __init__(self, task: TaskId, around: SimulationContext, servers: Mapping[TaskId, SimulatedServer]) -> None:
        self.task = task
        self.step: Step = INITIAL_STEP
        self._beginning: Step = INITIAL_STEP
        """The step that is about to begin, or has begun."""
        self.finished = False
        self._around = around
        self._servers = servers
        self._job: JobId = 0
        self._state = b""
        """The local state: what a worker has besides the parameters. Each step changes it."""
        self._untold: Step | None = None
        """The step whose preceding state has not been sent yet."""
        self._steps = dict(around.scenario.odd_steps).get(task, around.scenario.training.steps)
        self._plan: Plan | None = None
        self._versions: dict[BucketId, int] = {}
        self._counts: Counter[int] = Counter()
        """How many buckets are at each version."""
        self._editions: dict[BucketId, int] = {}
        self._following: list[BucketId] = []
        """Those of this step that leave after its seal."""
        self._asked = 0
        """How often it has asked for the norm of this step, and without which buckets."""
        self._absent: frozenset[BucketId] = frozenset()
        self._reading: dict[BucketId, Cell] = {}
        self._lent: dict[BucketId, LentCell | None] = {}
        """Buckets that are read where this task's own share has them."""
        self._lanes = Lanes()
        self._place = around.rng.place()
        self._draws = 0
        self._after_call: Callable[[], None] | None = None
        """How the program goes on after the call that it is in."""
        self._before_call = Doing.STARTING.value
        """What it did before."""
        self.slowed: tuple[Step, float] | None = None
        """The step from which steps are slower, and by how much (a planted fault)."""
        self.stuck: dict[Step, tuple[str, float]] = {}
        """Where, and for how long, the training thread is stuck in a step (a planted fault)."""
        self.doing = (Doing.STARTING.value, 0.0)
        """What the training thread does, and since when."""

    # -- effects --

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case SendPull():
                self._send_pull(effect)
            case SendGradient():
                self._send_gradient(effect)
            case VersionReady():
                self._on_version_ready(effect)
            case CallAnswered():
                self._on_answered(effect)
            case NormKnown():
                self._on_norm(effect)
            case _:
                raise TypeError(f"a worker does not carry out {effect}")

    def _send_pull(self, effect: SendPull) -> None:
        assert self._plan is not None
        nbytes = self._plan.arena_bytes
        if effect.peer == self.task:
            self._around.tell_itself(self.task, Pull(effect.version, effect.have, own_ticket(nbytes), view=effect.view))
            return
        link = self._around.network.link(self.task, effect.peer)
        link.send(self.task, Pull(effect.version, effect.have, ticket_for(link, nbytes), view=effect.view))

    def _lend_to_itself(self, effect: SendGradient) -> None:
        """The share in the same task reads the gradient in place."""
        around, me, life = self._around, self.task, self._around.incarnations[self.task]
        ended = TransferEnded(me, effect.step, effect.bucket, TensorKind.GRADIENT, ok=True)
        loan = OwnLoan(around.memory.gradients(me, effect.bucket), lambda: around.soon(me, ended))
        around.after(me, 0.0, lambda: self._hand_over(effect, life, loan))

    def _send_gradient(self, effect: SendGradient) -> None:
        around = self._around
        if effect.peer == self.task:
            self._lend_to_itself(effect)
            return
        route = around.route(self.task, effect.peer, effect.ticket)
        if route is None:
            return
        life = around.incarnations[self.task]
        if around.network.strikes(Chance.GHOST, route.way):
            self._send_ghost(effect, route)
        source = around.memory.gradients(self.task, effect.bucket)
        assert self._plan is not None
        parcel = Parcel(TensorKind.GRADIENT, effect.step, effect.bucket, self._plan.buckets[effect.bucket].nbytes)
        if around.network.profile.lent_in_place:
            SimulatedLoan(
                around.network, route, parcel, source, lambda loan: self._hand_over(effect, life, loan)
            ).start()
        else:
            target = around.memory.inbox(effect.peer, self.task, life, effect.bucket)
            arrive = partial(self._hand_over, effect, life, target)
            Copy(around.network, route, parcel, source, target, self._lanes, arrive).start()
        route.link.break_by_chance(route.way)

    def _hand_over(self, effect: SendGradient, life: Incarnation, where: Where) -> None:
        server = self._servers[effect.peer]
        server.take(self.task, life, effect.step, effect.bucket, effect.edition, where)

    def _send_ghost(self, effect: SendGradient, route: Route) -> None:
        """The same bucket, from an incarnation that has ended: it landed in that incarnation's own region."""
        former_life = self._around.incarnations[self.task] ^ 1
        cell = self._around.memory.inbox(effect.peer, self.task, former_life, effect.bucket)

        def arrive() -> None:
            if route.receiver_is_up():
                self._hand_over(effect, former_life, cell)

        self._around.network.after_delay(route.way, arrive)

    # -- the training loop --

    def became_member(self, effect: BecameMember) -> None:
        self._job = effect.job
        self._state = effect.state or b"as built"
        scenario = self._around.scenario
        # Without recovery, every task starts from scratch, however late its view comes.
        start = effect.start if scenario.recovers else INITIAL_STEP
        self._later(self._seconds(scenario.training.prepare), lambda: self._prepare(start, effect.checkpoint))

    @property
    def _oracle(self) -> Oracle:
        return self._around.oracles[self._job]

    def _seconds(self, span: SecondsRange) -> float:
        return self._around.rng.seconds_at(span, self._place, self._next_draw())

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._around.rng.at(self._place, self._next_draw()) < probability

    def _next_draw(self) -> int:
        self._draws += 1
        return self._draws

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._around.after(self.task, seconds, action)

    def _parameters(self) -> tuple[ParameterEntry, ...]:
        entries = self._around.scenario.parameters
        if self.task not in self._around.scenario.odd_models:
            return entries
        first = entries[0]
        return (ParameterEntry(first.name, first.elements + 1, first.dtype, first.group), *entries[1:])

    def _prepare(self, start: Step, checkpoint: str) -> None:
        scenario, parameters = self._around.scenario, self._parameters()
        plan = self._around.plan(parameters, scenario.bucket_bytes)
        self._plan = plan
        self._versions = {bucket.id: INITIAL_STEP for bucket in plan.buckets}
        self._counts[INITIAL_STEP] = len(self._versions)
        if self.task == CHIEF:
            self._oracle.buckets = tuple(self._versions)
        layout = Layout(plan.hash, plan.bucket_bytes, parameters, (), start=start, checkpoint=checkpoint)
        self._around.handle(self.task, Prepared(plan, layout))
        if self.task == CHIEF and start == INITIAL_STEP:
            self._produce(self._ordered(list(self._versions)), lambda: None)
        self._call(CallPlace(0, OUTSIDE_LOOPS, 0), self._begin_if_held)

    def _call(self, place: CallPlace, then: Callable[[], None]) -> None:
        """A call that all workers make, if programs make any."""
        if not self._around.scenario.training.calls:
            then()
            return
        self._after_call, self._before_call = then, self.doing[0]
        self.doing = (Doing.CALLING.value, self._around.agenda.now)
        made = CallMade(place, "gather", "", "simulated", "simulated.py:1", brought_to(place, self.task.index))
        self._around.handle(self.task, Calling(made))

    def _on_answered(self, effect: CallAnswered) -> None:
        self._oracle.call_answered(effect.answer)
        then, self._after_call = self._after_call, None
        assert then is not None
        self.doing = (self._before_call, self._around.agenda.now)
        self._later(0.0, then)

    def _on_version_ready(self, effect: VersionReady) -> None:
        bucket, version = effect.bucket, effect.version
        lent = self._servers[self.task].arrivals.pop(effect.arrival) if effect.arrival else None
        self._lent[bucket] = lent
        self._oracle.received(self.task, bucket, version, self._cell(bucket))
        self._counts[self._versions[bucket]] -= 1
        self._counts[version] += 1
        self._versions[bucket] = version
        if self._around.scenario.aggregate is None:
            self._start_reading(bucket)
        self._begin_if_held()

    def _cell(self, bucket: BucketId) -> Cell:
        """Where the current version of a bucket is."""
        lent = self._lent.get(bucket)
        return self._around.memory.parameters(self.task, bucket) if lent is None else lent.cell

    def _start_reading(self, bucket: BucketId) -> None:
        """From now on, the bytes must not change: a layer may compute with a bucket before the others are here."""
        if bucket not in self._reading:
            self._reading[bucket] = self._cell(bucket)
            self._reading[bucket].readers += 1

    def _begin_if_held(self) -> None:
        """All buckets are at the next version: start its step. A worker that was left behind starts a later one."""
        version = next(iter(self._versions.values()), self.step + 1)
        if self._after_call is not None:
            return
        if self._counts[version] == len(self._versions) and version > max(self.step, self._beginning):
            self._beginning = version
            # A worker that may be left behind does not compute before it knows which version it will get.
            for bucket in self._versions:
                self._start_reading(bucket)
            self.doing = (Doing.COMPUTING.value, self._around.agenda.now)
            self._later(self._seconds(self._around.scenario.training.forward), partial(self._begin, version))

    def _begin(self, step: Step) -> None:
        self.step = step
        if self._untold is not None:
            self._around.handle(self.task, StateTaken(self._untold, self._state))
            self._untold = None
        if self.step == self._steps:
            self.finished = True
            self.doing = (Doing.FINISHING.value, self._around.agenda.now)
            self._around.handle(self.task, Finished(self._steps))
            return
        profile = self._around.scenario.training
        absent = frozenset(bucket for bucket in self._versions if self._chance(profile.absent_chance))
        self._editions = {}
        filled = [bucket for bucket in self._versions if bucket not in absent]
        if self._around.scenario.mode.seals:
            absent |= {bucket for bucket in filled if self._chance(profile.withdraw_chance)}
            filled += [bucket for bucket in filled if self._chance(profile.edit_chance)]
        self._following = self._to_follow(filled, absent)
        filled = [bucket for bucket in filled if bucket not in self._following]
        self._oracle.step_planned(self.task, self.step, absent)
        self._around.handle(self.task, StepBegun(self.step, self._rates_to_say(at_seal=False)))
        self._asked = 0
        backward = partial(self._produce, self._ordered(filled), lambda: self._ask_or_seal(absent))
        self._hold_up(lambda: self._call(CallPlace(1, self.step, 0), backward))

    def _to_follow(self, filled: list[BucketId], absent: frozenset[BucketId]) -> list[BucketId]:
        """The buckets that leave after the seal."""
        scenario = self._around.scenario
        of_all = scenario.mode is Mode.SEALED and scenario.servers and scenario.aggregate is None
        if not (scenario.training.seals_early and of_all) or questions_in(scenario, self.step):
            return []
        once = [bucket for bucket in self._versions if bucket not in absent and filled.count(bucket) == 1]
        return [bucket for bucket in once if self._chance(0.5)]

    def _hold_up(self, then: Callable[[], None]) -> None:
        """A training thread that a planted fault makes slow or stuck."""
        where, seconds = self.stuck.get(self.step, (Doing.COMPUTING.value, 0.0))
        if self.slowed is not None and self.step >= self.slowed[0]:
            seconds += self.slowed[1]
        self.doing = (where, self._around.agenda.now)
        if seconds:
            self._later(seconds, then)
        else:
            then()

    def _ordered(self, buckets: list[BucketId]) -> list[BucketId]:
        """The order in which backward fills the buckets."""
        if self._around.scenario.training.in_order:
            return buckets
        return sorted(buckets, key=lambda _: self._around.rng.at(self._place, self._next_draw()))

    def _rates_to_say(self, *, at_seal: bool) -> tuple[GroupRates, ...]:
        scenario = self._around.scenario
        if not scenario.servers:
            return ()  # every worker has its own optimizer
        anybody = scenario.aggregate is not None or scenario.shrinks
        if at_seal is not scenario.training.rates_at_seal or not (self.task == CHIEF or anybody):
            return ()
        rates = (GroupRates(("lr",), (1.0 / (self.step + 1),)),)
        self._oracle.rates_said(self.step, rates)
        return rates

    def _produce(self, buckets: list[BucketId], then: Callable[[], None]) -> None:
        """Fill these buckets, one after another; one that is listed twice is edited."""
        if not buckets:
            then()
            return
        bucket, rest = buckets[0], buckets[1:]
        edition = self._editions.get(bucket, -1) + 1
        if bucket not in self._following:
            self._note_computed(bucket)
        tag = self._oracle.tag(self.task, self.step, bucket, edition)
        cell = self._around.memory.gradients(self.task, bucket)
        cell.write(0, tag)

        def filled() -> None:
            cell.write(1, tag)
            self._editions[bucket] = edition
            if not self._around.scenario.mode.seals:
                self._stop_reading(bucket)
            self._around.handle(self.task, Produced(self.step, bucket))
            self._produce(rest, then)

        self._later(self._seconds(self._around.scenario.training.backward), filled)

    def _note_computed(self, bucket: BucketId) -> None:
        if self._around.numbers is not None:
            self._around.numbers.gradient_made(self.task, self.step, bucket, self._computed(bucket))

    def _computed(self, bucket: BucketId) -> int:
        """The gradient of this bucket, made of what its parameters and the local state are now."""
        if self.step == INITIAL_STEP:
            return mixed("initial", bucket)
        parameters = self._cell(bucket).whole()
        assert isinstance(parameters, VersionTag)
        return mixed(self.task.index, self.step, bucket, parameters.number, self._state)

    def _stop_reading(self, bucket: BucketId) -> None:
        cell = self._reading.pop(bucket, None)
        if cell is not None:
            cell.readers -= 1
        if (lent := self._lent.pop(bucket, None)) is not None:
            lent.release()

    # -- clipping --

    def _ask_or_seal(self, absent: frozenset[BucketId]) -> None:
        """Ask for the norm of the mean as often as this step does; the answer to the last question is not awaited."""
        questions = questions_in(self._around.scenario, self.step)
        if self._asked == questions:
            self._seal(absent)
            return
        self._asked += 1
        self._absent = absent
        asking = Sealed(self.step, tuple(sorted(absent)), (), clip=(CLIP,), asks=True, state=None)
        self._around.handle(self.task, asking)
        if self._asked == questions:
            self._seal(absent)
        else:
            self.doing = (Doing.WAITING.value, self._around.agenda.now)

    def _on_norm(self, effect: NormKnown) -> None:
        """Before it asks again, it edits what it has."""
        if effect.step != self.step or self._asked >= questions_in(self._around.scenario, self.step):
            return
        again, absent = list(self._editions), self._absent
        self.doing = (Doing.COMPUTING.value, self._around.agenda.now)
        self._produce([bucket for bucket in again if bucket not in absent], lambda: self._ask_or_seal(absent))

    def _seal(self, absent: frozenset[BucketId]) -> None:
        around = self._around
        void = around.scenario.mode.seals and self._chance(around.scenario.training.void_chance)
        editions = {**self._editions, **dict.fromkeys(self._following, 0)}
        self._oracle.step_sealed(self.task, self.step, editions, void=void)
        for bucket in self._following:
            self._note_computed(bucket)
        # If buckets are applied eagerly, reading the others stopped when they were produced.
        for bucket in list(self._reading) if around.scenario.mode.seals else absent:
            self._stop_reading(bucket)
        rates = self._rates_to_say(at_seal=True)
        self.doing = (Doing.WAITING.value, around.agenda.now)
        clip = (CLIP,) if self._asked else ()
        sealed = Sealed(self.step, tuple(sorted(absent)), rates, void=void, state=self._next_state(), clip=clip)
        around.handle(self.task, sealed)
        self._produce(list(self._following), lambda: None)
        if around.scenario.training.calls and around.scenario.mode.seals:
            self._call(CallPlace(1, self.step, 1), self._begin_if_held)
        elif not self._versions:
            self._begin_if_held()

    def _next_state(self) -> bytes | None:
        """The local state after this step, if the seal carries it; the library, of which all ranks are, sends it when
        the next step begins."""
        scenario = self._around.scenario
        if not scenario.rules.keeps_states:
            return None
        self._state = mixed(self._state, self.step).to_bytes(4, "big")
        if scenario.mode.seals or not scenario.servers:
            self._untold = self.step + 1
            return None
        return self._state
