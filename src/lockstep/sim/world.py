"""A whole cluster in one object: the real machines, a virtual clock, a seeded network.

``World(scenario).run()`` plays the scenario to its end and checks the invariants after each event; it raises
``Violation`` with the last events where one does not hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from lockstep.protocol.effects import Apply, BecameMember, Effect, JobEnded, Send, StillMissing
from lockstep.protocol.errors import ProtocolError
from lockstep.protocol.events import Event, PeerGone, Tick
from lockstep.protocol.ids import Incarnation, TaskId
from lockstep.protocol.server import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.sim.agenda import Agenda
from lockstep.sim.dice import Dice
from lockstep.sim.invariants import Invariants
from lockstep.sim.machines import MachineMaker
from lockstep.sim.memory import Memory, Violation
from lockstep.sim.network import Network, Traffic
from lockstep.sim.oracle import make_oracle
from lockstep.sim.scenario import Kill, Scenario, Span
from lockstep.sim.server_side import ServerSide
from lockstep.sim.surroundings import Surroundings
from lockstep.sim.worker_side import WorkerSide

LINGER_SECONDS = 30.0
"""How long the coordinator's task stays after the end, so that everybody is told of it."""
GONE = Span(0.0, 3.0)
"""How long it takes others to find out that a task is dead."""
TRACE_LENGTH = 60


@dataclass(slots=True)
class SimTask:
    """One task of the cluster: its machines and everything around them."""

    machine: TaskMachine
    side: WorkerSide | ServerSide
    start_at: float
    started: bool = False
    left: bool = False
    outcome: JobEnded | None = None
    tick_at: float | None = None

    @property
    def lives(self) -> bool:
        return self.started and not self.left


@dataclass(frozen=True, slots=True)
class Result:
    """How a run went."""

    seconds: float
    events: int
    outcomes: dict[TaskId, JobEnded]
    missing: dict[TaskId, tuple[str, ...]]
    """Whom each task was told to be missing, last."""
    dropped: int
    """Gradients that servers refused: duplicates, stale ones, those of other lives."""
    traffic: Traffic

    @property
    def ok(self) -> bool:
        return bool(self.outcomes) and all(outcome.ok for outcome in self.outcomes.values())


class World:
    """One run."""

    def __init__(self, scenario: Scenario, maker: MachineMaker | None = None) -> None:
        self.scenario = scenario
        self.agenda = Agenda()
        self.dice = Dice(scenario.seed)
        shape = scenario.shape
        self._incarnations: dict[TaskId, Incarnation] = {task: self.dice.incarnation() for task in shape.tasks()}
        self.network = Network(shape, scenario.network, self.dice, self.agenda, self.handle, self._incarnations)
        self.oracle = make_oracle(shape, scenario.mode, self._incarnations, scenario.aggregate)
        around = Surroundings(
            scenario,
            self.agenda,
            self.dice,
            self.network,
            Memory(),
            self.oracle,
            self._incarnations,
            self.handle,
            self._lives,
        )
        self.tasks: dict[TaskId, SimTask] = {}
        self._make_tasks(around, maker or MachineMaker())
        self.invariants = Invariants(self.oracle, {t: task.machine for t, task in self.tasks.items()})
        self._missing: dict[TaskId, tuple[str, ...]] = {}
        self._trace: deque[tuple[float, TaskId, Event]] = deque(maxlen=TRACE_LENGTH)

    def _make_tasks(self, around: Surroundings, maker: MachineMaker) -> None:
        job = self.dice.incarnation()
        servers = {task: ServerSide(task, around) for task in self.scenario.shape.server_ids()}
        workers = {task: WorkerSide(task, around, servers) for task in self.scenario.shape.worker_ids()}
        sides: dict[TaskId, WorkerSide | ServerSide] = {**servers, **workers}
        for task, side in sides.items():
            start_at = self.dice.seconds(self.scenario.start)
            machine = maker.task_machine(self.scenario, task, self._incarnations[task], job, start_at)
            self.tasks[task] = SimTask(machine, side, start_at)

    def _lives(self, task: TaskId) -> bool:
        return self.tasks[task].lives

    # -- a run --

    def run(self) -> Result:
        """Play to the end; Violation where an invariant breaks or the run does not end."""
        self.begin()
        limit = self.scenario.network.quiet_after + self.scenario.patience
        try:
            while not all(task.left for task in self.tasks.values()):
                if not len(self.agenda):
                    raise Violation("nobody has a deadline: nothing will ever happen again")
                if self.agenda.now > limit:
                    raise Violation(f"the run has not ended within {limit:.0f} s")
                self.agenda.run_next()
        except (AssertionError, ProtocolError) as broken:
            raise Violation(f"{broken}\n{self.story()}") from broken
        self._check_end()
        return self.result()

    def begin(self) -> None:
        """Plan what the scenario says will happen. ``run`` does it; a test that plays by itself calls it first."""
        for name, task in self.tasks.items():
            if name in self.scenario.absentees:
                task.left = True
            else:
                self.agenda.at(task.start_at, partial(self._start, name))
        for kill in self.scenario.kills:
            self.agenda.at(kill.at, partial(self._kill, kill))

    def _start(self, name: TaskId) -> None:
        task = self.tasks[name]
        if task.left:
            return
        task.started = True
        self._carry_out_all(task, task.machine.start(self.agenda.now))
        self._plan_tick(name, task)
        for peer, link in self.network.links_of(name):
            if self.tasks[peer].lives:
                self.agenda.after(self.dice.seconds(Span(0.0, 0.3)), link.open)

    def handle(self, name: TaskId, event: Event) -> None:
        """The only way in to the machines of a task."""
        task = self.tasks[name]
        if not task.lives:
            return
        self._trace.append((self.agenda.now, name, event))
        effects = task.machine.handle(event, self.agenda.now)
        self._carry_out_all(task, effects)
        self.invariants.after_event(name)
        self._plan_tick(name, task)

    # -- time --

    def _plan_tick(self, name: TaskId, task: SimTask) -> None:
        deadline = task.machine.next_deadline()
        if deadline is not None and task.lives and (task.tick_at is None or deadline < task.tick_at):
            task.tick_at = deadline
            self.agenda.at(deadline, lambda: self._tick(name, task, deadline))

    def _tick(self, name: TaskId, task: SimTask, planned: float) -> None:
        if task.tick_at != planned or not task.lives:
            return
        task.tick_at = None
        deadline = task.machine.next_deadline()
        if deadline is not None and deadline <= self.agenda.now:
            self.handle(name, Tick())
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
                if isinstance(task.side, WorkerSide):
                    task.side.became_member()
            case StillMissing(missing=missing):
                self._missing[name] = tuple(one.task for one in missing)
            case JobEnded():
                self._end(task, effect)
            case Apply():
                self.invariants.before_apply(name, effect)
                task.side.carry_out(effect)
            case _:
                task.side.carry_out(effect)

    # -- leaving --

    def _end(self, task: SimTask, effect: JobEnded) -> None:
        if task.outcome is not None:
            raise Violation(f"{task.machine.task} was told of the end twice")
        task.outcome = effect
        if task.machine.coordinator is None:
            # Not at once: the machine is still in the middle of an event.
            self.agenda.after(0.0, lambda: self._leave(task, orderly=True))
        else:
            self._linger(task, self.agenda.now + LINGER_SECONDS)

    def _linger(self, task: SimTask, until: float) -> None:
        others = [other for other in self.tasks.values() if other is not task]
        if self.agenda.now >= until or all(other.left for other in others):
            self._leave(task, orderly=True)
        else:
            self.agenda.after(0.5, lambda: self._linger(task, until))

    def _leave(self, task: SimTask, *, orderly: bool) -> None:
        if task.left:
            return
        task.left = True
        name = task.machine.task
        for _, link in self.network.links_of(name):
            link.close(name, f"{name} has left", orderly=orderly)

    def _kill(self, kill: Kill) -> None:
        task = self.tasks[kill.task]
        if task.left:
            return
        self._leave(task, orderly=False)
        gone = PeerGone(kill.task, "was killed by signal 9")
        for peer, _ in self.network.links_of(kill.task):
            self.agenda.after(self.dice.seconds(GONE), partial(self.handle, peer, gone))

    # -- the end --

    def _check_end(self) -> None:
        outcomes = [task.outcome for task in self.tasks.values()]
        if not all(outcome is not None and outcome.ok for outcome in outcomes):
            return
        odd = dict(self.scenario.odd_steps)
        steps = {w: odd.get(w, self.scenario.training.steps) for w in self.scenario.shape.worker_ids()}
        self.oracle.finished_well(steps)
        for task in self.tasks.values():
            if isinstance(task.side, ServerSide) and task.side.arrivals:
                raise Violation(f"{task.machine.task} never gave back {len(task.side.arrivals)} gradients")

    def result(self) -> Result:
        roles = [task.machine.role for task in self.tasks.values()]
        return Result(
            self.agenda.now,
            self.agenda.done,
            {name: task.outcome for name, task in self.tasks.items() if task.outcome is not None},
            dict(self._missing),
            sum(sum(role.dropped.values()) for role in roles if isinstance(role, ServerMachine)),
            self.network.traffic,
        )

    def story(self) -> str:
        """What happened last, and who waits for whom: what one reads first after a violation."""
        now = self.agenda.now
        lines = [f"at {now:.3f} s of {self.scenario}"]
        lines += [f"  {time:10.4f} {task.short:9} {event}" for time, task, event in self._trace]
        for task in self.tasks.values():
            if task.lives:
                lines += [f"  waits: {wait.phrase(now)}" for wait in task.machine.waits()]
        return "\n".join(lines)
