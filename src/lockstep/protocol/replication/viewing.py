"""How a task keeps to one view: whose messages count, which come later, whom to follow."""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.replication.replica_events import MessageHeard, ReplicaEffect, Say, TaskEnds
from lockstep.protocol.replication.replica_messages import Entering, Follow, InView, Stamped, ViewOf
from lockstep.protocol.replication.speech import Speech

PATIENCE_SECONDS = 60.0
"""How long a task waits for another one that is silent, or for a coordinator."""


class Viewing:
    """The view that one task is in."""

    def __init__(self, task: TaskId, life: Incarnation, coordinator: TaskId) -> None:
        """``coordinator``: who forms the cluster, as far as a task knows that has just started."""
        self.task = task
        self.life = life
        self.number = 0
        self.members: dict[TaskId, Incarnation] = {}
        self.linked: dict[TaskId, Incarnation] = {}
        self.linked_before: dict[TaskId, Incarnation] = {}
        """The incarnation of each task that this one was last linked to."""
        self.unreachable: dict[TaskId, float] = {}
        """Tasks whose link is lost, and since when."""
        self.gone: set[tuple[TaskId, Incarnation]] = set()
        """Incarnations whose end is proven."""
        self._placement: Placement | None = None
        self._leader = coordinator
        self._leader_view = 0
        self._postponed: list[MessageHeard] = []
        self._led_until: float | None = None
        """Since when the coordinator of this view is known to have ended."""

    @property
    def placement(self) -> Placement:
        assert self._placement is not None, "not in a view yet"
        return self._placement

    def link(self, peer: TaskId, life: Incarnation) -> None:
        self.linked[peer] = self.linked_before[peer] = life
        self.unreachable.pop(peer, None)

    def unlink(self, peer: TaskId, now: float) -> None:
        self.linked.pop(peer, None)
        self.unreachable.setdefault(peer, now)

    def is_member(self, peer: TaskId, life: Incarnation) -> bool:
        return self.members.get(peer) == life

    # -- without a coordinator --

    def _has_ended(self, task: TaskId | None) -> bool:
        return task is None or (task, self.members[task]) in self.gone

    def note(self, now: float) -> None:
        """Called after every event."""
        led = self.number == 0 or not self._has_ended(self.placement.coordinator)
        self._led_until = None if led else now if self._led_until is None else self._led_until

    @property
    def deadline(self) -> float | None:
        """Until when somebody must have taken the coordinator's place."""
        return None if self._led_until is None else self._led_until + PATIENCE_SECONDS

    def end_if_headless(self, now: float) -> list[ReplicaEffect]:
        """End this task if the coordinator has ended and nobody can take its place, or nobody has for long."""
        if self.number == 0 or not self._has_ended(self.placement.coordinator):
            return []
        deputy = self.placement.deputy
        cannot = deputy == self.task and not self.placement.coordination.whole
        if not cannot and not self._has_ended(deputy) and (self.deadline is None or now < self.deadline):
            return []
        return [TaskEnds(Reason(Cause.DEAD, phrases.nobody_coordinates(), peer=str(self.placement.coordinator)))]

    # -- messages --

    def admit(self, event: MessageHeard) -> InView | None:
        """What this message says, if it was said in this view by a member of it; one of a later view is kept."""
        stamped = event.message
        assert isinstance(stamped, Stamped)
        if stamped.view > self.number:
            self._postponed.append(event)
            return None
        if stamped.view < self.number or not self.is_member(event.peer, event.incarnation):
            return None
        return stamped.message

    def take_postponed(self) -> list[MessageHeard]:
        kept, self._postponed = self._postponed, []
        return kept

    def change_to(self, view: ViewOf) -> list[TaskId]:
        """Take this view; returns the tasks that are there in another incarnation than before, or no more."""
        members = dict(view.members)
        changed = [task for task, life in self.members.items() if members.get(task) != life]
        self.number, self._placement, self.members = view.number, view.placement, members
        return changed

    def speech(self) -> Speech:
        return Speech(self.task, self.number, self.members, self.linked)

    # -- entering --

    def enter(self) -> list[ReplicaEffect]:
        """Ask the coordinator to take part, if it can be reached."""
        return [Say(self._leader, Entering())] if self._leader in self.linked else []

    def follow(self, coordinator: TaskId, view: int) -> bool:
        """Another server coordinates than this task believed; whether that is news."""
        if view <= self._leader_view:
            return False
        self._leader, self._leader_view = coordinator, view
        return True

    def tell_whom_to_follow(self, stranger: TaskId) -> list[ReplicaEffect]:
        return [Say(stranger, Follow(self.placement.coordinator, self.number))]
