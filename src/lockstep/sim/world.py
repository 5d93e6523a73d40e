"""A whole cluster in one object: the real machines, a virtual clock, a seeded network.

``World(scenario).run()`` plays the scenario to its end and checks the invariants after each event; it raises
``Violation`` with the last events if one does not hold. What disturbs a run on purpose is in ``disturb.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import (
    Apply,
    BecameMember,
    CallAnswered,
    Effect,
    JobEnded,
    NormKnown,
    Noticed,
    PeerLeaves,
    Send,
    SendGradient,
    SendPull,
    StillMissing,
    VersionReady,
    ViewChanged,
)
from lockstep.protocol.core.errors import ProtocolError
from lockstep.protocol.core.events import Event, GradientArrived, LinkUp, PeerGone, Tick, VersionArrived
from lockstep.protocol.core.ids import BucketId, Incarnation, JobId, Role, Step, TaskId
from lockstep.protocol.core.messages import Member
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.sim.agenda import Agenda
from lockstep.sim.context import SimulationContext
from lockstep.sim.disk import Disk
from lockstep.sim.invariants import Invariants
from lockstep.sim.machines import MachineMaker
from lockstep.sim.memory import SimulatedMemory
from lockstep.sim.network import SimulatedNetwork, SimulatedTraffic
from lockstep.sim.numbers import Numbers
from lockstep.sim.oracle import Oracle, make_oracle
from lockstep.sim.rng import SeededRandom
from lockstep.sim.scenario import Kill, Scenario, SecondsRange
from lockstep.sim.server_side import SimulatedServer
from lockstep.sim.task import SimTask
from lockstep.sim.violation import Rule, Violation, with_story
from lockstep.sim.worker_side import SimulatedWorker

LINGER_SECONDS = 30.0
"""How long the coordinator's task stays after the end, so that every task receives it."""
GONE = SecondsRange(0.0, 3.0)
"""How long it takes others to find out that a task is dead."""
TRACE_LENGTH = 60
TICK_IS_QUEUED = -1.0
LARGE = 64
"""From this many tasks on, deadlines are checked only if a nearer one is possible: checks would be most of the work."""

Watching = Callable[[TaskId, Event, float], None]


class Interrupter(Protocol):
    """Decides at every event whether something happens to the task that handles it (``kill_points.py``)."""

    def event_begins(self, task: SimTask) -> None: ...

    def kills_before_effects(self, task: SimTask) -> bool: ...

    def event_ended(self, task: SimTask) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run went."""

    seconds: float
    events: int
    outcomes: dict[TaskId, JobEnded]
    missing: dict[TaskId, tuple[str, ...]]
    """The tasks that each task last reported as missing."""
    dropped: int
    """Gradients that servers refused: duplicates, stale ones, those of other incarnations."""
    traffic: SimulatedTraffic

    @property
    def ok(self) -> bool:
        return bool(self.outcomes) and all(outcome.ok for outcome in self.outcomes.values())


class World:
    """One run."""

    def __init__(self, scenario: Scenario, maker: MachineMaker | None = None) -> None:
        self.scenario = scenario
        self.agenda = Agenda()
        self.rng = SeededRandom(scenario.seed)
        self.tasks: dict[TaskId, SimTask] = {}
        self.watching: Watching | None = None
        """Called with every event that a machine handles; for measurements."""
        self.on_step: dict[TaskId, Callable[[Step], None]] = {}
        """Called with each step that a task begins; planted faults wait there."""
        self.interrupter: Interrupter | None = None
        shape = scenario.shape
        self.incarnations: dict[TaskId, Incarnation] = {task: self.rng.incarnation() for task in shape.tasks()}
        self.network = SimulatedNetwork(
            shape, scenario.network, self.rng, self.agenda, self.handle, self.incarnations, scenario.mishaps
        )
        self.network.lives = lambda task: self.tasks[task].lives
        self.network.admits = self._admits
        self.disk = Disk()
        self._oracles: dict[JobId, Oracle] = {}
        self._past: dict[TaskId, set[Incarnation]] = {}
        self.around = SimulationContext(
            scenario,
            self.agenda,
            self.rng,
            self.network,
            SimulatedMemory(),
            self._oracles,
            self.disk,
            Numbers() if scenario.recovers and not scenario.shrinks else None,
            self.incarnations,
            self.tasks,
            self.handle,
        )
        self.job = self.rng.incarnation()
        self.servers: dict[TaskId, SimulatedServer] = {}
        self._maker = maker or MachineMaker()
        late = dict(scenario.late_starts)
        for task in shape.tasks():
            self.make_life(task, self.rng.seconds(scenario.start) + late.get(task, 0.0))
        self._remaining = len(self.tasks)
        self._restarting = 0
        """Tasks that have left and will come back, in a run that recovers."""
        large = len(self.tasks) >= LARGE
        self._loop_seconds = scenario.training.loop_seconds
        self._tick_horizon = REPEAT_SECONDS if large else 0.0
        self.invariants = Invariants(shape, self._oracles, self.tasks, large=large)
        self._missing: dict[TaskId, tuple[str, ...]] = {}
        self._trace: deque[tuple[float, TaskId, Event]] = deque(maxlen=TRACE_LENGTH)

    def make_life(self, name: TaskId, start_at: float) -> SimTask:
        """The machines and the memory of a task that will start then."""
        beginning = self.disk.beginning()
        if name == self.scenario.shape.coordinator:
            oracle = self._oracles[self.job] = make_oracle(self.scenario, self.incarnations, self._past)
            oracle.numbers = self.around.numbers
            if beginning.checkpoint:
                oracle.begin_with(saved.tag for saved in self.disk.checkpoints[beginning.start].buckets.values())
        machine = self._maker.task_machine(self.scenario, name, self.incarnations[name], self.job, start_at, beginning)
        worker = SimulatedWorker(name, self.around, self.servers) if name.role is Role.WORKER else None
        server = SimulatedServer(name, self.around) if name in self.scenario.shape.homes else None
        if server is not None:
            self.servers[name] = server
        self.tasks[name] = SimTask(machine, worker, server, start_at)
        return self.tasks[name]

    # -- a run --

    def run(self, within: float = 0.0) -> RunResult:
        """Play to the end; Violation if an invariant breaks or the run does not end in time."""
        self.begin()
        limit = within or self.scenario.network.quiet_after + self.scenario.patience
        agenda = self.agenda
        try:
            while not self.over:
                if not len(agenda):
                    raise Violation(Rule.NO_DEADLINE, "no task has a deadline: nothing will ever happen again")
                if agenda.now > limit:
                    raise Violation(Rule.NO_END, f"the run has not ended within {limit:.0f} s")
                agenda.run_next()
            self._check_end()
        except (AssertionError, ProtocolError) as broken:
            raise with_story(broken, self.story()) from broken
        return self.result()

    def begin(self) -> None:
        """Plan what the scenario prescribes. ``run`` does this; a test that plays by itself calls it first."""
        for name, task in self.tasks.items():
            if name in self.scenario.absentees:
                task.left = True
                self._remaining -= 1
            else:
                self.agenda.at(task.start_at, partial(self.start, task))
        for kill in self.scenario.kills:
            self.agenda.at(kill.at, partial(self._kill, kill))

    def start(self, task: SimTask) -> None:
        """An incarnation begins."""
        if task.left:
            return
        task.started = True
        name = task.machine.task
        self._carry_out_all(task, task.machine.start(self.agenda.now))
        self._plan_tick(name, task)
        for peer, link in self.network.links_of(name):
            if self.tasks[peer].lives:
                self.agenda.after(self.rng.seconds(SecondsRange(0.0, 0.3)), link.open)

    def handle(self, name: TaskId, event: Event) -> None:
        """The only way into the machines of a task; a loop that is busy or frozen handles the event later."""
        task = self.tasks[name]
        if task.left or not task.started:
            return
        if task.events or task.frozen_since >= 0 or task.loop_free_at > self.agenda.now:
            task.events.append(event)
            self.drain_later(task)
            return
        self._handle_now(name, task, event)

    def _handle_now(self, name: TaskId, task: SimTask, event: Event) -> None:
        now = self.agenda.now
        self._trace.append((now, name, event))
        if self.watching is not None:
            self.watching(name, event, now)
        if task.tick_at == TICK_IS_QUEUED and type(event) is Tick:
            task.tick_at = None
        if type(event) is LinkUp:
            task.met[event.peer] = event.incarnation
        interrupter = self.interrupter
        if interrupter is not None:
            interrupter.event_begins(task)
        effects = task.machine.handle(event, now)
        if interrupter is not None and interrupter.kills_before_effects(task):
            return
        if self._loop_seconds:
            task.loop_free_at = now + self._loop_seconds
            task.loop_busy += self._loop_seconds
        self._carry_out_all(task, effects)
        self.invariants.after_event(name)
        if interrupter is not None:
            interrupter.event_ended(task)
        if self.on_step and task.machine.role.step > task.step_seen:
            self._step_began(name, task)
        # Every deadline that an event sets is at least a repetition away: a tick before that is near enough.
        if task.tick_at is None or not self._tick_horizon or task.tick_at > now + self._tick_horizon:
            self._plan_tick(name, task)

    def _step_began(self, name: TaskId, task: SimTask) -> None:
        task.step_seen = task.machine.role.step
        action = self.on_step.get(name)
        if action is not None:
            action(task.step_seen)

    def drain_later(self, task: SimTask) -> None:
        """The loop of this task handles the next event when it has finished the last one."""
        if not task.draining and not task.frozen:
            task.draining = True
            self.agenda.at(task.loop_free_at, partial(self._drain, task))

    def _drain(self, task: SimTask) -> None:
        task.draining = False
        while task.events and task.lives and not task.frozen and task.loop_free_at <= self.agenda.now:
            self._handle_now(task.machine.task, task, task.events.popleft())
        if task.events and task.lives:
            self.drain_later(task)

    # -- time --

    def _plan_tick(self, name: TaskId, task: SimTask) -> None:
        deadline = task.machine.next_deadline()
        if deadline is not None and task.lives and (task.tick_at is None or deadline < task.tick_at):
            task.tick_at = deadline
            self.agenda.at(deadline, partial(self._tick_due, name, task, deadline))

    def _tick_due(self, name: TaskId, task: SimTask, planned: float) -> None:
        if task.tick_at == planned and task.lives:
            task.act(partial(self._tick, name, task))

    def _tick(self, name: TaskId, task: SimTask) -> None:
        task.tick_at = None
        if not task.lives:
            return
        deadline = task.machine.next_deadline()
        if deadline is not None and deadline <= self.agenda.now:
            if task.behind or task.loop_free_at > self.agenda.now:
                # One is enough: the next deadline is checked once the loop has handled it.
                task.tick_at = TICK_IS_QUEUED
                self.handle(name, Tick())
                return
            self.handle(name, Tick())
            if task.lives:
                self.invariants.after_tick(name, self.agenda.now)
        self._plan_tick(name, task)

    # -- effects --

    def _carry_out_all(self, task: SimTask, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out(task, effect)

    def _carry_out(self, task: SimTask, effect: Effect) -> None:
        name = task.machine.task
        match effect:
            case Send(peer=peer, message=message):
                self.network.link(name, peer).send(name, message)
            case BecameMember():
                self._know(task, effect.members)
                for side in task.sides:
                    side.became_member(effect)
            case ViewChanged(members=members):
                self._know(task, members)
            case PeerLeaves() | Noticed():
                pass
            case StillMissing(missing=missing):
                self._missing[name] = tuple(one.task for one in missing)
            case JobEnded():
                self._end(task, effect)
            case SendPull() | SendGradient() | VersionReady() | CallAnswered() | NormKnown():
                assert task.worker is not None
                task.worker.carry_out(effect)
            case _:
                if isinstance(effect, Apply):
                    self.invariants.before_apply(name, effect)
                assert task.server is not None
                task.server.carry_out(effect)

    def _know(self, task: SimTask, members: tuple[Member, ...]) -> None:
        task.members = {TaskId.parse(member.task): member.incarnation for member in members}

    def _admits(self, here: TaskId, there: TaskId) -> bool:
        """As in the runtime: a member accepts links only with members; the coordinator decides about a new incarnation.

        For a task with buckets that returns, it knows that the job must start again first.
        """
        task, now = self.tasks[here], self.incarnations[there]
        has_buckets = there in self.scenario.shape.homes
        decides = task.machine.coordinator is not None and not (has_buckets and self.scenario.recovers)
        return decides or task.members.get(there, now) == now

    # -- leaving --

    def _end(self, task: SimTask, effect: JobEnded) -> None:
        if task.outcome is not None:
            raise Violation(Rule.TOLD_TWICE, f"{task.machine.task} received the end twice")
        task.outcome = effect
        if self.scenario.recovers and (effect.again or effect.departure is not None):
            self.agenda.after(0.0, partial(self._begin_again, task))
            return
        if task.machine.coordinator is None:
            # Not at once: the machine is still in the middle of an event.
            self.agenda.after(0.0, partial(self.leave, task, orderly=True))
            if not effect.ok and self._gives_up(task):
                self._tell_gone(task, f"ended with exit code 3: {effect.reason.text}")
        else:
            self._linger(task, self.agenda.now + LINGER_SECONDS)

    def _begin_again(self, task: SimTask) -> None:
        """The job continues with another incarnation of this task, in the same process or not."""
        if not task.left:
            self.leave(task, orderly=True)
            self._tell_gone(task, "was started again", Cause.STALE_INCARNATION)
            self.restart_after(task.machine.task, self.rng.seconds(self.scenario.restart))

    def _gives_up(self, task: SimTask) -> bool:
        """Whether this task, which never became a member, gave up on its own while the coordinator continues."""
        home = self.tasks[self.scenario.shape.coordinator]
        coordinator = home.machine.coordinator
        return task.machine.member.job == 0 and home.lives and coordinator is not None and coordinator.end is None

    def _linger(self, task: SimTask, until: float) -> None:
        if self.agenda.now >= until or self._remaining + self._restarting == 1:
            self.leave(task, orderly=True)
        else:
            self.agenda.after(0.5, partial(self._linger, task, until))

    def leave(self, task: SimTask, *, orderly: bool) -> None:
        """This incarnation ends, in order or not."""
        if task.left:
            return
        task.left = True
        self._remaining -= 1
        name = task.machine.task
        if self.scenario.recovers:
            self._past.setdefault(name, set()).add(task.machine.incarnation)
        for event in task.events:
            if isinstance(event, GradientArrived | VersionArrived) and event.arrival and task.server is not None:
                task.server.arrivals.pop(event.arrival).release()
        for _, link in self.network.links_of(name):
            link.close(name, f"{name} has left", orderly=orderly)

    @property
    def over(self) -> bool:
        """Whether all tasks have left for good."""
        return self._remaining + self._restarting == 0

    def restart_after(self, name: TaskId, seconds: float) -> None:
        """Start the next incarnation of this task at that time; a run that does not recover may be over before."""
        self._restarting += self.scenario.recovers
        self.agenda.after(seconds, partial(self._restart, name))

    def _restart(self, name: TaskId) -> None:
        """New memory, new machines, new links. The machines decide what happens to it."""
        if self.over:
            return
        self._restarting -= self.scenario.recovers
        self._remaining += 1
        self.around.memory.forget(name)
        self.incarnations[name] = self.rng.incarnation()
        if name == self.scenario.shape.coordinator:
            self.job = self.rng.incarnation()
        before = self.tasks[name].lives_before + 1
        task = self.make_life(name, self.agenda.now)
        task.lives_before = before
        for _, link in self.network.links_of(name):
            link.revive()
        self.start(task)

    def _kill(self, kill: Kill) -> None:
        self.kill(self.tasks[kill.task], "was killed by signal 9", -9)

    def kill(self, task: SimTask, how: str, exit_code: int) -> None:
        """This incarnation ends without notice, and the others find out in their own time."""
        if task.left:
            return
        task.died_at, task.exit_code = self.agenda.now, exit_code
        self.leave(task, orderly=False)
        self._tell_gone(task, how)

    def _tell_gone(self, task: SimTask, how: str, cause: Cause = Cause.DEAD) -> None:
        """The monitor of a task reports to every task that asks how it ended."""
        name = task.machine.task
        gone = PeerGone(name, Reason(cause, how, exit_code=task.exit_code), task.machine.incarnation)
        for peer, _ in self.network.links_of(name):
            self.agenda.after(self.rng.seconds(GONE), partial(self._tell_of_end, self.tasks[peer], gone))

    def _tell_of_end(self, task: SimTask, gone: PeerGone) -> None:
        name = task.machine.task
        if self.scenario.recovers and (self.tasks[name] is not task or task.met.get(gone.peer) != gone.incarnation):
            return  # it never knew that incarnation, or knows the next one already
        self.handle(name, gone)

    # -- the end --

    def _check_end(self) -> None:
        outcomes = [task.outcome for task in self.tasks.values()]
        if not all(outcome is not None and outcome.ok for outcome in outcomes):
            return
        self.check_completion()

    def check_completion(self) -> None:
        """Violation if a step is incomplete or a gradient was never given back."""
        odd = dict(self.scenario.odd_steps)
        steps = {w: odd.get(w, self.scenario.training.steps) for w in self.scenario.shape.worker_ids()}
        for job in {task.machine.member.job for task in self.tasks.values() if task.outcome is not None} - {0}:
            self._oracles[job].finished_well(steps)
        for task in self.tasks.values():
            if task.server is not None and task.server.arrivals:
                raise Violation(
                    Rule.NOT_GIVEN_BACK, f"{task.machine.task} never gave back {len(task.server.arrivals)} tensors"
                )

    def numbers(self) -> dict[BucketId, int]:
        """The number of each bucket's newest version, in a run that tracks numbers."""
        return self._oracles[self.job].newest()

    def result(self) -> RunResult:
        servers = [task.machine.server for task in self.tasks.values()]
        return RunResult(
            self.agenda.now,
            self.agenda.done,
            {name: task.outcome for name, task in self.tasks.items() if task.outcome is not None},
            dict(self._missing),
            sum(sum(role.dropped.values()) for role in servers if role is not None),
            self.network.traffic,
        )

    def story(self) -> str:
        """What happened last, and who waits for whom: what to read first after a violation."""
        now = self.agenda.now
        lines = [f"at {now:.3f} s of {self.scenario}"]
        lines += [f"  {time:10.4f} {task.short:9} {event}" for time, task, event in self._trace]
        for task in self.tasks.values():
            if task.lives:
                lines += [f"  waits: {phrases.wait_line(wait, now)}" for wait in task.machine.waits()]
        return "\n".join(lines)
