"""The rest of a simulated worker: its memory, its training loop, and how it carries out the effects of its machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from lockstep.protocol.effects import Effect, SendGradient, SendPull, VersionReady
from lockstep.protocol.events import Finished, Prepared, Produced, Sealed, StepBegun
from lockstep.protocol.ids import CHIEF, INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.messages import GroupRates, Layout, ParameterEntry, Pull
from lockstep.protocol.plan import Plan, make_plan
from lockstep.sim.memory import Cell
from lockstep.sim.server_side import ServerSide
from lockstep.sim.surroundings import Surroundings, ticket_for
from lockstep.sim.transfers import Copy, Lanes, Loan, Parcel, Route


class WorkerSide:
    """One worker without its machines: what backward, the optimizer call and the wait for versions do."""

    def __init__(self, task: TaskId, around: Surroundings, servers: Mapping[TaskId, ServerSide]) -> None:
        self.task = task
        self.step: Step = INITIAL_STEP
        self.finished = False
        self._around = around
        self._servers = servers
        self._steps = dict(around.scenario.odd_steps).get(task, around.scenario.training.steps)
        self._plan: Plan | None = None
        self._versions: dict[BucketId, int] = {}
        self._editions: dict[BucketId, int] = {}
        self._reading: dict[BucketId, Cell] = {}
        self._lanes = Lanes()

    # -- effects --

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case SendPull(peer=peer, version=version, have=have):
                link = self._around.network.link(self.task, peer)
                assert self._plan is not None
                link.send(self.task, Pull(version, have, ticket_for(link, self._plan.arena_bytes)))
            case SendGradient():
                self._send_gradient(effect)
            case VersionReady(bucket=bucket, version=version):
                self._on_version_ready(bucket, version)
            case _:
                raise TypeError(f"a worker does not carry out {effect}")

    def _send_gradient(self, effect: SendGradient) -> None:
        around = self._around
        route = around.route(self.task, effect.peer, effect.ticket)
        life = around.incarnations[self.task]
        if around.network.happens(around.network.profile.ghost_chance):
            self._send_ghost(effect, route)
        source = around.memory.gradients(self.task, effect.bucket)
        parcel = Parcel(effect.step, effect.bucket)
        if around.network.profile.lent_in_place:
            Loan(around.network, route, parcel, source, lambda loan: self._hand_over(effect, life, loan)).start()
        else:
            target = around.memory.inbox(effect.peer, self.task, life, effect.bucket)
            arrive = partial(self._hand_over, effect, life, target)
            Copy(around.network, route, parcel, source, target, self._lanes, arrive).start()
        route.link.break_by_chance()

    def _hand_over(self, effect: SendGradient, life: Incarnation, where: Cell | Loan) -> None:
        server = self._servers[effect.peer]
        server.take(self.task, life, effect.step, effect.bucket, effect.edition, where)

    def _send_ghost(self, effect: SendGradient, route: Route) -> None:
        """The same bucket, from a life that has ended: it landed in that life's own region."""
        former_life = self._around.incarnations[self.task] ^ 1
        cell = self._around.memory.inbox(effect.peer, self.task, former_life, effect.bucket)

        def arrive() -> None:
            if route.receiver_is_up():
                self._hand_over(effect, former_life, cell)

        self._around.network.after_latency(arrive)

    # -- the training loop --

    def became_member(self) -> None:
        self._later(self._around.dice.seconds(self._around.scenario.training.prepare), self._prepare)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._around.after(self.task, seconds, action)

    def _parameters(self) -> tuple[ParameterEntry, ...]:
        entries = self._around.scenario.parameters
        if self.task not in self._around.scenario.odd_models:
            return entries
        first = entries[0]
        return (ParameterEntry(first.name, first.elements + 1, first.dtype, first.group), *entries[1:])

    def _prepare(self) -> None:
        scenario, parameters = self._around.scenario, self._parameters()
        plan = make_plan(parameters, scenario.servers, scenario.bucket_bytes)
        self._plan = plan
        self._versions = {bucket.id: INITIAL_STEP for bucket in plan.buckets}
        if self.task == CHIEF:
            self._around.oracle.buckets = tuple(self._versions)
        layout = Layout(plan.hash, plan.bucket_bytes, parameters, ())
        self._around.handle(self.task, Prepared(plan, layout))
        if self.task == CHIEF:
            self._produce(self._around.dice.shuffled(self._versions), lambda: None)
        self._begin_if_held()

    def _on_version_ready(self, bucket: BucketId, version: int) -> None:
        cell = self._around.memory.parameters(self.task, bucket)
        self._around.oracle.received(self.task, bucket, version, cell)
        self._versions[bucket] = version
        if self._around.scenario.aggregate is None:
            self._start_reading(bucket)
        self._begin_if_held()

    def _start_reading(self, bucket: BucketId) -> None:
        """From now on the bytes must not change: a layer may compute with a bucket before the others are here."""
        if bucket not in self._reading:
            self._reading[bucket] = self._around.memory.parameters(self.task, bucket)
            self._reading[bucket].readers += 1

    def _begin_if_held(self) -> None:
        """All buckets are at the next version: begin its step. A worker that was left behind begins a later one."""
        held = {*self._versions.values()} or {self.step + 1}
        if len(held) == 1 and max(held) > self.step:
            # A worker that may be left behind computes with nothing before it knows which version it will get.
            for bucket in self._versions:
                self._start_reading(bucket)
            seconds = self._around.dice.seconds(self._around.scenario.training.forward)
            self._later(seconds, partial(self._begin, max(held)))

    def _begin(self, step: Step) -> None:
        self.step = step
        if self.step == self._steps:
            self.finished = True
            self._around.handle(self.task, Finished(self._steps))
            return
        profile, dice = self._around.scenario.training, self._around.dice
        absent = frozenset(bucket for bucket in self._versions if dice.chance(profile.absent_chance))
        self._editions = {}
        filled = [bucket for bucket in self._versions if bucket not in absent]
        if self._around.scenario.mode.seals:
            absent |= {bucket for bucket in filled if dice.chance(profile.withdraw_chance)}
            filled += [bucket for bucket in filled if dice.chance(profile.edit_chance)]
        self._around.oracle.step_planned(self.task, self.step, absent)
        self._around.handle(self.task, StepBegun(self.step, self._rates_to_say(at_seal=False)))
        self._produce(dice.shuffled(filled), lambda: self._seal(absent))

    def _rates_to_say(self, *, at_seal: bool) -> tuple[GroupRates, ...]:
        scenario = self._around.scenario
        if at_seal is not scenario.training.rates_at_seal or (self.task != CHIEF and scenario.aggregate is None):
            return ()
        rates = (GroupRates(("lr",), (1.0 / (self.step + 1),)),)
        self._around.oracle.rates_said(self.step, rates)
        return rates

    def _produce(self, buckets: list[BucketId], then: Callable[[], None]) -> None:
        """Fill these buckets, one after the other; one that comes a second time is edited."""
        if not buckets:
            then()
            return
        bucket, rest = buckets[0], buckets[1:]
        edition = self._editions.get(bucket, -1) + 1
        tag = self._around.oracle.tag(self.task, self.step, bucket, edition)
        cell = self._around.memory.gradients(self.task, bucket)
        cell.write(0, tag)

        def filled() -> None:
            cell.write(1, tag)
            self._editions[bucket] = edition
            if not self._around.scenario.mode.seals:
                self._stop_reading(bucket)
            self._around.handle(self.task, Produced(self.step, bucket))
            self._produce(rest, then)

        self._later(self._around.dice.seconds(self._around.scenario.training.backward), filled)

    def _stop_reading(self, bucket: BucketId) -> None:
        cell = self._reading.pop(bucket, None)
        if cell is not None:
            cell.readers -= 1

    def _seal(self, absent: frozenset[BucketId]) -> None:
        around = self._around
        void = around.scenario.mode.seals and around.dice.chance(around.scenario.training.void_chance)
        around.oracle.step_sealed(self.task, self.step, dict(self._editions), void=void)
        # Where buckets are applied eagerly, the others have stopped being read when they were produced.
        for bucket in list(self._reading) if around.scenario.mode.seals else absent:
            self._stop_reading(bucket)
        rates = self._rates_to_say(at_seal=True)
        around.handle(self.task, Sealed(self.step, tuple(sorted(absent)), rates, void=void))
        if not self._versions:
            self._begin_if_held()
