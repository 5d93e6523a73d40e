"""One worker of a job with second homes: it keeps what a new home may ask for until nobody can.

Gradients and facts of a step are kept until every bucket of the next version is here: whatever is here, the second home
holds. States are kept for the step and the one after it: those before are held with the commit that needed them.
"""

from __future__ import annotations

from lockstep.protocol.core.events import LinkLost, LinkUp, PeerGone, Tick
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Incarnation, Step, TaskId, server
from lockstep.protocol.core.messages import Done, End, LocalState
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.replication.replica_events import (
    Compute,
    MessageHeard,
    ReplicaEffect,
    ReplicaEvent,
    StepComputed,
    TaskEnds,
)
from lockstep.protocol.replication.replica_messages import (
    Follow,
    GradientOf,
    InView,
    Stamped,
    UpdateFacts,
    VersionOf,
    ViewOf,
    WantVersion,
)
from lockstep.protocol.replication.viewing import Viewing


class ReplicatedWorker:
    """One worker."""

    def __init__(self, task: TaskId, life: Incarnation, buckets: int, steps: int) -> None:
        self.task = task
        self.viewing = Viewing(task, life, server(0))
        self.step: Step = INITIAL_STEP
        self.ended = False
        self._steps = steps
        self._buckets = buckets
        self._wanted = INITIAL_STEP
        """The version that is here, or asked for."""
        self._values: dict[BucketId, tuple[int, int]] = {}
        """The version of each bucket, and the memory that holds it."""
        self._computing = False
        self._facts: UpdateFacts | None = None
        self._gradients: tuple[tuple[BucketId, int], ...] = ()
        self._state = b""
        self._states: dict[Step, bytes] = {}

    # -- the door --

    def start(self, now: float) -> list[ReplicaEffect]:  # noqa: ARG002 - as all machines
        return []

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        effects = self._handle(event, now)
        self.viewing.note(now)
        self.ended = any(isinstance(effect, TaskEnds) for effect in effects)
        return effects

    def _handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        match event:
            case MessageHeard():
                return self._on_heard(event, now)
            case StepComputed():
                return self._on_computed(event)
            case LinkUp(peer=peer, incarnation=life):
                self.viewing.link(peer, life)
                return self.viewing.enter() if self.viewing.number == 0 else self._say_what_is_open()
            case LinkLost(peer=peer):
                self.viewing.unlink(peer, now)
                return []
            case PeerGone(peer=peer, incarnation=life):
                self.viewing.gone.add((peer, life))
                return self.viewing.end_if_headless(now)
            case Tick():
                return self.viewing.end_if_headless(now)
            case _:
                return []

    def _on_heard(self, event: MessageHeard, now: float) -> list[ReplicaEffect]:
        match event.message:
            case Stamped():
                message = self.viewing.admit(event)
                return self._on_version(message) if isinstance(message, VersionOf) else []
            case Follow(coordinator=coordinator, view=view):
                is_news = self.viewing.number == 0 and self.viewing.follow(coordinator, view)
                return self.viewing.enter() if is_news else []
            case ViewOf() as view:
                return self._on_view(event.peer, view, now)
            case End() as end:
                return [TaskEnds(end.reason, end)]
            case _:
                return []

    def _on_view(self, peer: TaskId, view: ViewOf, now: float) -> list[ReplicaEffect]:
        is_in = dict(view.members).get(self.task) == self.viewing.life
        if view.number <= self.viewing.number or view.placement.coordinator != peer or not is_in:
            return []
        first = self.viewing.number == 0
        self.viewing.change_to(view)
        effects: list[ReplicaEffect] = []
        if first:
            self.step, self._state = view.start, view.state
            self._wanted = max(view.start, 0)
            effects += self._go_on()
        effects += self._say_what_is_open()
        for event in self.viewing.take_postponed():
            effects += self._on_heard(event, now)
        return effects + self.viewing.end_if_headless(now)

    # -- steps --

    def _has_all(self) -> bool:
        return len(self._values) == self._buckets and all(v == self._wanted for v, _ in self._values.values())

    def _go_on(self) -> list[ReplicaEffect]:
        """Compute the step whose version is here; only the chief has something to give before there is one."""
        if self._computing or self._facts is not None:
            return []
        if self.step == INITIAL_STEP:
            self._computing = self.task == CHIEF
            return [Compute(self.step, (), self._state)] if self._computing else []
        if self.step >= self._steps or not self._has_all():
            return []
        self._computing = True
        values = tuple((bucket, tensor) for bucket, (_, tensor) in sorted(self._values.items()))
        return [Compute(self.step, values, self._state)]

    def _on_computed(self, event: StepComputed) -> list[ReplicaEffect]:
        self._computing = False
        self._facts, self._gradients, self._state = event.facts, event.gradients, event.state
        if event.step > INITIAL_STEP:
            self._states[event.step + 1] = event.state
        self._wanted = event.step + 1
        return self._say_what_is_open()

    def _on_version(self, message: VersionOf) -> list[ReplicaEffect]:
        known, _ = self._values.get(message.bucket, (INITIAL_STEP, 0))
        if message.version != self._wanted or known >= message.version:
            return []
        self._values[message.bucket] = (message.version, message.tensor)
        if not self._has_all() or self._wanted == self.step:
            return self._go_on()
        self.step = self._wanted
        self._facts, self._gradients = None, ()
        for old in [step for step in self._states if step < self.step]:
            del self._states[old]
        return self._go_on() + (self._say_what_is_open() if self.step >= self._steps else [])

    # -- what is open --

    def _say_what_is_open(self) -> list[ReplicaEffect]:
        """With every view and every link; receiving it twice changes nothing."""
        placement, speech = self.viewing.placement, self.viewing.speech()
        effects: list[ReplicaEffect] = []
        have = tuple(bucket for bucket, (version, _) in self._values.items() if version >= self._wanted)
        for homes in dict.fromkeys(homes.home_task for homes in placement.shards):
            said: list[InView] = [] if self._facts is None else [self._facts]
            said += [GradientOf(self.step, b, t) for b, t in self._gradients if placement.home_of(b) == homes]
            if len(have) < self._buckets:
                said.append(WantVersion(self._wanted, have))
            effects += speech.to(homes, *said)
        told: list[InView] = [LocalState(step, state) for step, state in sorted(self._states.items())]
        if self.step >= self._steps:
            told.append(Done(self._steps))
        return [*effects, *speech.to(placement.coordinator, *told)]

    # -- what others may ask --

    def next_deadline(self) -> float | None:
        return None if self.ended else self.viewing.deadline

    def waits(self) -> list[Wait]:
        if self.viewing.number == 0 or self._computing:
            return []
        missing = [b for b in range(self._buckets) if self._values.get(b, (INITIAL_STEP, 0))[0] < self._wanted]
        homes = dict.fromkeys(self.viewing.placement.home_of(bucket) for bucket in missing)
        return [Wait(self.task, home, WaitKind.PARAMETER, self.step, 0.0, 0.0, "asked for") for home in homes]

    def check(self) -> None:
        assert self._wanted in (self.step, self.step + 1), f"{self.task} in step {self.step} wants {self._wanted}"
